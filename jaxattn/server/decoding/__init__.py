"""Decoding: sampling parameters, structured outputs, stop strings, logprobs and tool calls."""
