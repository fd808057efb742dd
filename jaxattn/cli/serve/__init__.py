"""`python -m jaxattn.serve`: prompt completion, a chat in the terminal, or an HTTP server."""
