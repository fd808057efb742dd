"""Plain-JAX numerics: rotary embeddings, norms, matmuls, softmax and FP8 scaling."""
