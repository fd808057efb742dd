"""Plain-JAX numerics: rotary embeddings, norms, matmuls, softmax, FP8 scaling."""
