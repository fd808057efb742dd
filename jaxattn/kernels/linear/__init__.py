"""Linear layers of few tokens in 16 bits and FP8, and the RMS norm."""
