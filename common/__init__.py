"""What every Quire service shares: types, errors, hashing, the lease contract, and (outside the pure modules) RPC, telemetry and configuration."""
