"""The face for clients of Anthropic's Messages API: bodies become chats of `router/openai`, answers typed blocks."""
