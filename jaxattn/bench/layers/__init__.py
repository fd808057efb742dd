"""Benchmarks of linear layers, experts and one decode step."""
