"""Caches that a model keeps between steps: pages, recurrent states and symmetric memory."""
