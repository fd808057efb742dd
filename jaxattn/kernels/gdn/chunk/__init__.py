"""The parts of a chunk that prefill and its backward pass share: tiles, ring and state update."""
