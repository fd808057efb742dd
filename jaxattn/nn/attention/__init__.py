"""Attention layers over a paged cache: MLA, GQA, and GQA over TurboQuant pages."""
