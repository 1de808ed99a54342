"""Anthropic's Messages API: bodies become chats of `router/api/openai`, answers typed blocks."""
