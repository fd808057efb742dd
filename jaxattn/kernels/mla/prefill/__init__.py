"""MLA prefill: causal attention of one tile of queries."""
