"""Adapters of jaxattn to other libraries. Each needs an extra."""
