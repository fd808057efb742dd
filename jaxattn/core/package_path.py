"""The package's folder, defined only here relative to this file's depth."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
