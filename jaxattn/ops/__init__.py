"""The public ops with their plain-JAX references, one per file."""
