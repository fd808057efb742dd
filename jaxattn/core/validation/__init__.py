"""Checks of arguments, arrays, page tables and configurations."""
