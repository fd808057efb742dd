"""Kimi Delta Attention within one chunk: a decay per channel."""
