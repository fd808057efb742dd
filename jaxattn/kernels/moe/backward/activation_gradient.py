"""The gradient of the experts' SwiGLU, for rows that each have a token's weight.

    h = silu(gate) up
    hidden = share h                    what down's gradient reads
    of_gate, of_up = share of_h d h     of_h is the gradient of h where all weights are 1
    of_share = sum of_h h               of a row

A CTA has a few rows, and reads all of them before it writes. XLA takes two kernels, which both read
everything.

Limits: I a multiple of 128, rows a multiple of 4. Reference: `through_activation` of launch.py;
tests: tests/kernels/moe/test_gradient.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.silu import sigmoid_and_slope

TOGETHER, THREADS = 4, 128  # most rows of a CTA, and its threads
MOST_NUMBERS = 12288  # of each array that fit in a CTA's registers


def swiglu_serves(rows: int, width: int) -> bool:
    return width % THREADS == 0 and rows % TOGETHER == 0


def rows_of_a_block(width: int) -> int:
    return next((n for n in (TOGETHER, 2) if n * width <= MOST_NUMBERS), 1)


def swiglu_gradient(
    of_h: jax.Array, saved: jax.Array, shares: jax.Array, is_token: jax.Array, *, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (of gate and up [R, 2 I], hidden [R, I], both in saved's dtype, of_share float32
    [R]).

    Args:
        of_h: [R, I].
        saved: Gate and up, [R, 2 I].
        shares: float32 [R].
        is_token: Whether a row belongs to a token; the other rows get zeros, whatever they contain.
    """
    rows, width = of_h.shape
    out = launch(
        gradient_of_rows,
        name="moe_swiglu_gradient",
        grid={"block": rows // rows_of_a_block(width)},
        inputs={
            "of_h": of_h, "saved": saved, "shares": shares,
            "is_token": is_token.astype(jnp.int32),
        },
        outputs={
            "of_gates": jax.ShapeDtypeStruct(saved.shape, saved.dtype),
            "hidden": jax.ShapeDtypeStruct((rows, width), saved.dtype),
            "of_shares": jax.ShapeDtypeStruct((rows,), jnp.float32),
        },
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True,
            unsafe_no_auto_barriers=True,  # a sum has its own; otherwise threads share no data
        ),
        interpret=interpret,
    )  # fmt: skip
    return out["of_gates"], out["hidden"], out["of_shares"]


def gradient_of_rows(
    of_h: Any, saved: Any, shares: Any, is_token: Any, of_gates: Any, hidden: Any, of_shares: Any
) -> None:
    width = of_h.shape[1]
    rows_per_cta = rows_of_a_block(width)
    first = lax.axis_index("block") * rows_per_cta
    vector = next(n for n in (4, 2, 1) if width % (n * THREADS) == 0)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)
    halves = pl.ds(0, width), pl.ds(width, width)

    def read(ref: Any, row: Any, columns: Any) -> jax.Array:
        return plgpu.load(ref.at[row, columns], layout=layout, optimized=False)

    rows = [first + i for i in range(rows_per_cta)]
    loaded_rows = [
        [read(of_h, row, halves[0]), *(read(saved, row, half) for half in halves)] for row in rows
    ]
    for row, numbers in zip(rows, loaded_rows, strict=True):
        share, row_is_token = shares[row], is_token[row] != 0
        mask = lax.broadcast_in_dim(row_is_token, (width,), ())
        # A select, and not a product: a row of padding may contain NaN.
        hidden_gradient, gate, up = (
            lax.select_n(mask, jnp.zeros_like(each), each).astype(jnp.float32) for each in numbers
        )
        gate_sigmoid, slope = sigmoid_and_slope(gate)
        silu = gate * gate_sigmoid
        h, scaled = silu * up, hidden_gradient * share
        of_gate = scaled * up * slope
        for target, half, value in (
            (of_gates, halves[0], of_gate), (of_gates, halves[1], scaled * silu),
            (hidden, halves[0], h * share),
        ):  # fmt: skip
            target.at[row, half][...] = value.astype(target.dtype)
        of_shares[row] = jnp.sum(hidden_gradient * h)
