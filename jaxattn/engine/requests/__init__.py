"""Requests and results of the engine: prompts, outputs, ids and statistics."""
