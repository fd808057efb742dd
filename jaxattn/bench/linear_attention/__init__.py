"""Benchmarks of the gated delta rule and Kimi Delta Attention."""
