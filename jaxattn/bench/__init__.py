"""`python -m jaxattn.bench`: what the kernels and the whole step reach on this GPU."""
