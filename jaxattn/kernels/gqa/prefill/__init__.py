"""Grouped-query prefill: causal attention of one tile of packed rows."""
