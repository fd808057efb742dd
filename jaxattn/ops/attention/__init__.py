"""Packed sequences and gradients, which all causal attention ops without a cache share."""
