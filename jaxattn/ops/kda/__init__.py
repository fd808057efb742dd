"""Kimi Delta Attention; `jaxattn.kda` is the public module."""
