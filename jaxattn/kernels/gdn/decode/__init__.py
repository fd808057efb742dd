"""Decode of the delta rule: one token per row and state."""
