"""How families of models write thoughts and tool calls: read from their output, and enforced on it."""
