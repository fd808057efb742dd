"""Triton kernels of other packages, with arguments in the order in which `jax_triton` gives them."""
