"""Grouped-query attention; `jaxattn.gqa` is the public module."""
