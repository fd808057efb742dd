"""Split-KV decode: tile scheduler, partial results and their combine."""
