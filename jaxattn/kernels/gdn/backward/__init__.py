"""Gradients of the chunked gated delta rule."""
