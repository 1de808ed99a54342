"""Device memory: the device, the paged KV cache, the token table, the byte plan."""
