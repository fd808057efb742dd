"""The Responses API: its endpoints, tools, input items and output items."""
