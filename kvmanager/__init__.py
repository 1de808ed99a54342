"""The KV manager: owns block tables, the prefix cache, eviction and preemption for a pool of GPU workers."""
