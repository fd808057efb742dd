"""The map of published tensors to parameters, with the transform of each."""
