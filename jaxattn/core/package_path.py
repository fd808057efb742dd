"""The package's folder: the one place that knows how deep its files are."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
