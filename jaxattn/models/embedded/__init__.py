"""The byte-level model that ships with the package."""
