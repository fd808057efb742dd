"""Plots of stored results."""
