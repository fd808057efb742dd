"""The check of tokens that have any number of axes before their features."""

from typing import Any

from jaxattn.paged import FLOATS


def check_features(
    op: str, x: Any, axis: str, name: str, weights: tuple[int, ...], of: int
) -> None:
    """Raises unless `x` is a floating array whose last axis is axis `of` of the named weights."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{op}: x must be an array, got {type(x).__name__}")
    if str(x.dtype) not in FLOATS:
        raise TypeError(f"{op}: x must be {' or '.join(FLOATS)}, got {x.dtype} {tuple(x.shape)}")
    if not x.shape or x.shape[-1] != weights[of]:
        raise ValueError(f"{op}: x {tuple(x.shape)} must have the {axis} of {name} {weights} last")
