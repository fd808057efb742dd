"""Linear layers for few tokens, RMS norms, and both fused in one launch."""
