"""From request fields to text: sampling, structured outputs, stop strings and tool calls."""
