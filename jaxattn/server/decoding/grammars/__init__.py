"""Grammars that answers follow: from a request's fields to llguidance's text."""
