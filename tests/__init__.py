"""Tests, in the same rooms as jaxattn; helpers/ is what they share."""
