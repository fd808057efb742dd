"""Ops over the memory of peer GPUs, with their plain-JAX references."""
