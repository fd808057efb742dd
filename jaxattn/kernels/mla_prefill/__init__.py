"""MLA prefill: kernel.py is the causal attention of one tile of queries."""
