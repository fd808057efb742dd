"""Public models that the plan knows by name, and the sizes of their parts."""
