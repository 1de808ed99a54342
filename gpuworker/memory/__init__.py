"""Device memory: the device, the paged KV cache, the token table, the plan of bytes."""
