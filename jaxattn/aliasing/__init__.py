"""Proof that a compiled step copies no donated buffer; it imports nothing of jaxattn."""
