"""The command-line interfaces `python -m jaxattn.serve` and `python -m jaxattn.plan`."""
