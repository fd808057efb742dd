"""Mixture of experts: router, routing and experts; `jaxattn.moe` is the public module."""
