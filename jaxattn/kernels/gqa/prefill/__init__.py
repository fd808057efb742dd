"""Grouped-query prefill: causal attention of tiles of packed rows."""
