"""Commands for developers: `python -m scripts.NAME`."""
