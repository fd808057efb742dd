"""Kernels over the symmetric memory of peer GPUs."""
