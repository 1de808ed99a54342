"""Workloads of a prefix cache, and their replay on the manager's pool core."""
