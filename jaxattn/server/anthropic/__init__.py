"""Anthropic's Messages API: its requests as chats, and answers in blocks of content."""
