"""`python -m jaxattn.bench offline MODEL`: whole requests through the engine, beside vLLM."""
