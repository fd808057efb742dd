"""Grouped-query decode over TurboQuant pages."""
