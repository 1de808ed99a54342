"""Load for a KV manager: simulated workers' reports, and large pools of its core."""
