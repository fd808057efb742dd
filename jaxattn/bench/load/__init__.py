"""`python -m jaxattn.bench serve`: load on a server of OpenAI's form, ours or another's."""
