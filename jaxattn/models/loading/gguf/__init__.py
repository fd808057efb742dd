"""GGUF files: their header, the configuration that it holds, and the blocks of their weights."""
