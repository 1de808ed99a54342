"""What the services agree on: types, errors, limits, hashing, leases, the clock. Standard library only."""
