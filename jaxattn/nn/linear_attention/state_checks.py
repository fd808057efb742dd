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
    num_new_tokens = np.asarray(query_lens)
    if not traced[0]:
        # A padding row's are not used.
        num_new_tokens = np.where(np.asarray(slots) >= 0, num_new_tokens, 0)
    description, tokens = f"query_lens {query_lens.shape}", x.shape[1]
    limit_description = f"x {tuple(x.shape)} has {tokens} tokens per row"
    OpArguments(op).check_most(description, num_new_tokens, tokens, limit_description)
    if traced[1]:
        return
    ends = np.asarray(seq_lens)
    exceeds_seq_len = (num_new_tokens > 0) & (num_new_tokens > ends)
    if exceeds_seq_len.any():
        row = int(exceeds_seq_len.argmax())
        raise ValueError(
            f"{op}: {description} holds {num_new_tokens[row]} for row {row}, but seq_lens, which "
            f"includes these tokens, holds {ends[row]}"
        )
