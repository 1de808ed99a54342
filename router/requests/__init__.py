"""One request from validation to its last token."""
