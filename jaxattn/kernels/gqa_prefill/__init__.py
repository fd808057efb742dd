"""Grouped-query prefill: body.py is the causal attention of one tile of packed rows."""
