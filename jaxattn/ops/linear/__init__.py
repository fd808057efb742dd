"""Linear layers of few tokens, RMS norms, and both in one launch."""
