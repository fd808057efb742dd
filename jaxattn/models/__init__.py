"""Models, their configurations and checkpoints."""
