"""Decode of the delta rule: one or a few tokens per row and state."""
