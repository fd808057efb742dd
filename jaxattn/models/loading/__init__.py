"""Weights from disk or a hub to the devices."""
