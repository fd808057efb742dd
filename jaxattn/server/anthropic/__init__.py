"""Anthropic's Messages API: the translation of its requests to chats, and its content blocks."""
