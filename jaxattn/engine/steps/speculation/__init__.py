"""Speculative decoding: where drafts come from, and what of them counts."""
