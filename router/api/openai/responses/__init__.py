"""The Responses API: OpenAI's form of a conversation that the server may keep."""
