"""Speculative decoding: the sources of drafts, and their verification."""
