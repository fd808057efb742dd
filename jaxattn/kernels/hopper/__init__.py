"""The Hopper layer of all kernels: launches, device checks, PTX, and JAX's internals."""
