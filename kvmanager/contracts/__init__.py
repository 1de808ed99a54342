"""What the manager's rooms share: blocks, sequences, the ledger's configuration, events of the index. Pure."""
