"""The published formats of tool calls, each with an incremental reader."""
