"""`python -m jaxattn.bench serve`: load tests of OpenAI-compatible servers."""
