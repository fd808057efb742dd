"""Benchmarks of ops and layers with their gradients."""
