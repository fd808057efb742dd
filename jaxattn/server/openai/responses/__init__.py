"""The Responses API: its input items, its output items, and what is stored of responses."""
