"""Grouped-query attention over TurboQuant caches."""
