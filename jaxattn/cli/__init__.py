"""The command lines: `python -m jaxattn.serve` and `python -m jaxattn.plan`."""
