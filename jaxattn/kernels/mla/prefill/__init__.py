"""MLA prefill: causal attention of tiles of queries."""
