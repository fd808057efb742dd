"""Arrays that hold adjacent groups of columns of one matrix, and the one that a CTA uses."""

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


def use_group(
    groups: Sequence[Any], column: Any, width: int, use: Callable[[Any, Any], Any]
) -> Any:
    """Returns `use(ref, its columns)`, called for the group that has a CTA's columns.

    Args:
        groups: Refs [N, C_i] of adjacent groups of columns, each a multiple of `width`.
        column: The first of the CTA's `width` columns, in the whole matrix.
    """
    ends = list(accumulate(group.shape[1] for group in groups))

    def of_group(ref: Any, end: int) -> Any:
        return use(ref, pl.ds(pl.multiple_of(column - (end - ref.shape[1]), width), width))

    number = sum((column >= end).astype(jnp.int32) for end in ends[:-1])
    branches = [functools.partial(of_group, *pair) for pair in zip(groups, ends, strict=True)]
    return lax.switch(number, branches) if len(branches) > 1 else branches[0]()
