"""Where the package lies: the one place that knows how deep its files are."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
