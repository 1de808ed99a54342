"""What clients and services share besides the generated code: errors, value types, statuses, channel options."""
