"""Public models that a plan knows by name, and the sizes of their parts."""
