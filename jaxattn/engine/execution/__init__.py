"""The engine's loop: it sends steps, keeps them in flight, and processes their outputs."""
