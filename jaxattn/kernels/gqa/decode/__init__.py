"""Grouped-query decode over pages of keys and values."""
