"""What a step does and on which blocks: lease agent, step scheduler, sequences, drafts, batch plans. Pure."""
