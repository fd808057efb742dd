"""Host-side scheduling: waiting and running requests, pages, prefix cache, batch updates."""
