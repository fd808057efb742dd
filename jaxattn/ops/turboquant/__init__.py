"""Grouped-query attention over TurboQuant pages."""
