"""Checks of a delta-rule layer's pools, slots and lengths."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxattn.core.cache.state_pool import check_pool
from jaxattn.core.layer_index import checkable_layer
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import (
    check_array,
    check_integers,
)


def check_pools(
    op: str,
    x: Array,
    conv_state: Any,
    ssm_state: Any,
    slots: Any,
    layer: Any,
    *,
    conv_shape: tuple[int, ...],
    state_shape: tuple[int, ...],
) -> None:
    """Raises if the pools, or the slots of x's rows, do not match the shapes of a slot."""
    for name, pool, shape in (
        ("conv_state", conv_state, conv_shape),
        ("ssm_state", ssm_state, state_shape),
    ):
        check_array(op, name, pool)
        if not jnp.issubdtype(pool.dtype, jnp.floating):
            raise TypeError(f"{op}: {name} must be floating, got {pool.dtype} {pool.shape}")
        check_pool(op, name, pool, slots, checkable_layer(layer), shape, x.shape[0])
    if conv_state.shape[:-2] != ssm_state.shape[:-3]:
        raise ValueError(
            f"{op}: conv_state {conv_state.shape} and ssm_state {ssm_state.shape} must have the "
            "same number of slots and of layers"
        )


def _check_numbers(op: str, name: str, numbers: Any, x: Array) -> None:
    check_array(op, name, numbers)
    check_integers(op, name, numbers, f"[{x.shape[0]}]", fits=numbers.shape == x.shape[:1])


def check_lengths(op: str, x: Array, slots: Any, seq_lens: Any, query_lens: Any) -> None:
    _check_numbers(op, "seq_lens", seq_lens, x)
    _check_numbers(op, "query_lens", query_lens, x)
    traced = [isinstance(given, jax.core.Tracer) for given in (slots, seq_lens, query_lens)]
    if x.shape[0] == 0 or traced[2]:
        return
    new = np.asarray(query_lens)
    if not traced[0]:
        new = np.where(np.asarray(slots) >= 0, new, 0)  # a padding row's are not used
    described, tokens = f"query_lens {query_lens.shape}", x.shape[1]
    but = f"x {tuple(x.shape)} has {tokens} tokens per row"
    OpArguments(op).check_most(described, new, tokens, but)
    if traced[1]:
        return
    ends = np.asarray(seq_lens)
    short = (new > 0) & (new > ends)
    if short.any():
        row = int(short.argmax())
        raise ValueError(
            f"{op}: {described} holds {new[row]} for row {row}, but seq_lens, which includes "
            f"these tokens, holds {ends[row]}"
        )
