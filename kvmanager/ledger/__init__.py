"""The ledger of one worker's blocks: reports and grants, preemption, rebuild, audit. Pure."""
