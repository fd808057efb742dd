"""Gradients of a mixture of experts."""
