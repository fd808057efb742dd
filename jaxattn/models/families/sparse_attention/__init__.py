"""Families whose layers attend to tokens that an indexer chooses (DeepSeek Sparse Attention)."""
