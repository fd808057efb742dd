"""Caches of a model between steps: pages, recurrent states and symmetric memory."""
