"""Families of grouped-query attention alone: Llama and those that differ from it in little."""
