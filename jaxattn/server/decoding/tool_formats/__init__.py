"""Published formats of tool calls, each with a reader that works while the text arrives."""
