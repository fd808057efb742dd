"""Grouped-query attention: cache append, decode and prefill."""
