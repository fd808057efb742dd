"""Linear layers for few tokens with 16-bit, FP8 and 4-bit weights, and the RMS norm."""
