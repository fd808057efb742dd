"""Top-k gating, and the alignment of tokens to expert tiles."""
