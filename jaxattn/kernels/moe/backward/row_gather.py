"""A gather of tokens into the rows of their pairs (token, expert), with zeros in rows of padding.

A CTA copies a few rows, and reads all of them before it writes. Reads come from L2, which holds the
tokens. For 89,984 rows of 2,048 numbers it takes 140 us, and XLA's gather 181 (H200).

Limits: F a multiple of 128; XLA gathers the rest. Tests: tests/kernels/moe/test_gradient.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.moe.routing.small_batch_alignment import PAIRS, windows

TOGETHER = 4  # rows of a CTA


def tokens_in_rows(x: jax.Array, pairs: jax.Array, top_k: int, **modes: Any) -> jax.Array:
    """Returns [R, F]: the token of x [T, F] of each row's pair t * top_k + k, and 0 where the pair
    is negative."""
    rows, features = len(pairs), x.shape[1]
    if features % PAIRS or rows % TOGETHER:
        token = jnp.maximum(pairs, 0) // top_k
        return jnp.where((pairs >= 0)[:, None], x[token], 0)
    return launch(
        functools.partial(copy_rows, top_k),
        name="moe_gather",
        grid={"block": rows // TOGETHER},
        inputs={"x": x, "pairs": pairs},
        outputs={"rows": jax.ShapeDtypeStruct((rows, features), x.dtype)},
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **modes,
    )["rows"]


def copy_rows(top_k: int, x: Any, pairs: Any, rows: Any) -> None:
    first, features = lax.axis_index("block") * TOGETHER, x.shape[1]
    ((_, layout),) = windows(features)
    found = []
    for row in range(TOGETHER):
        pair = pairs[first + row]
        token = lax.div(jnp.maximum(pair, 0), jnp.int32(top_k))
        numbers = plgpu.load(x.at[token], layout=layout, optimized=False)
        # A select, and not a product: a row of padding may contain NaN.
        found.append(
            lax.select_n(
                lax.broadcast_in_dim(pair >= 0, (features,), ()), jnp.zeros_like(numbers), numbers
            )
        )
    for row, numbers in enumerate(found):
        rows.at[first + row][...] = numbers
