"""Benchmarks of MLA, GQA and TurboQuant attention."""
