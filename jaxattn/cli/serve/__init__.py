"""`python -m jaxattn.serve`: prompts, a chat in the terminal, or an HTTP server."""
