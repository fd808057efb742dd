"""Triton kernels of other packages, with arguments in the order of `jax_triton`."""
