"""What kernels need of the machine, and of JAX that is not public."""
