"""Families with only grouped-query attention: Llama, and models that differ from it in details."""
