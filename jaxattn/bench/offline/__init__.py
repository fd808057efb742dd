"""`python -m jaxattn.bench offline MODEL`: whole requests, compared with vLLM."""
