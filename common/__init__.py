"""What every Quire service shares: types, errors, hashing and leases, which are pure; RPC, telemetry and options."""
