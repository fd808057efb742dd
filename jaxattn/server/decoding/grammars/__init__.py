"""The grammars of answers, and the translation of JSON schemas and patterns for llguidance."""
