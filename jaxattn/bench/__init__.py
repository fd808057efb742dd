"""`python -m jaxattn.bench`: benchmarks of kernels, decode steps and whole models."""
