"""Timing, device information, run metadata, references and result tables."""
