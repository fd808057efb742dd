"""GGUF files: their header, the configuration that it contains, and the blocks of their weights."""
