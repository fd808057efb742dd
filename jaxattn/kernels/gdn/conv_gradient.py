"""The gradient of what the SiLU behind a causal convolution takes, and the sums of its taps.

    total = sum_j taps[j] x[t - (W - 1) + j]      of the token's own sequence, W = 4
    of_total = of_y silu'(total)                  written once, rounded to x's dtype
    of_taps[j] = sum_t of_total[t] x[t - (W - 1) + j]

A block has some tokens of some channels, its threads 1 or 2 channels each: what comes before a
token is in registers. Blocks write their sums of taps, which XLA adds up in a fixed order.

Limits: bfloat16 or float16; 4 taps; channels a multiple of 128; 4,194,240 tokens. XLA computes the
rest.
Reference: `jaxattn.ops.gdn.causal_conv1d`; tests: tests/ops/gdn/test_conv.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import require_hopper

OP = "causal_conv1d"
THREADS, TAPS = 128, 4
TOKENS, TOGETHER = 64, 8  # tokens of a block, and those that are read ahead
MOST_TOKENS = 65535 * TOKENS  # the most blocks of CUDA's second axis


def conv_gradient(
    x: jax.Array, of_y: jax.Array, taps: jax.Array, position: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(of_total [N, Dc] in x's dtype, of_taps float32 [W, Dc]) of x and of_y [N, Dc].

    Args:
        taps: [W, Dc], the last of which is the token's own.
        position: int32 [N], of each token in its sequence.
    """
    require_hopper(OP, interpret=interpret)
    tokens, channels = x.shape
    served = x.dtype in (jnp.bfloat16, jnp.float16) and len(taps) == TAPS
    if not served or channels % THREADS or not 0 < tokens <= MOST_TOKENS:
        raise Refusal(f"{OP}: no kernel has the gradient of {x.dtype} {x.shape}, {len(taps)} taps")
    more = -tokens % TOKENS
    if more:  # of padding nothing is added, as no gradient comes in
        x, of_y = (jnp.pad(each, ((0, more), (0, 0))) for each in (x, of_y.astype(x.dtype)))
        position = jnp.pad(position, (0, more))
    vector = next(n for n in (2, 1) if channels % (n * THREADS) == 0)
    blocks = len(x) // TOKENS
    out = launch(
        functools.partial(gradient_of_tokens, vector),
        name="conv_gradient",
        grid={"block": blocks, "part": channels // (vector * THREADS)},
        inputs={"x": x, "of_y": of_y.astype(x.dtype), "taps": taps.astype(jnp.float32),
                "position": position},
        outputs={"of_total": jax.ShapeDtypeStruct(x.shape, x.dtype),
                 "of_taps": jax.ShapeDtypeStruct((blocks, TAPS, channels), jnp.float32)},
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )  # fmt: skip
    return out["of_total"][:tokens], out["of_taps"].sum(axis=0)


def gradient_of_tokens(
    vector: int, x: Any, of_y: Any, taps: Any, position: Any, of_total: Any, of_taps: Any
) -> None:
    width = vector * THREADS
    here = pl.ds(pl.multiple_of(lax.axis_index("part") * width, width), width)
    first = lax.axis_index("block") * TOKENS
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)

    def read(ref: Any, row: Any) -> jax.Array:
        return plgpu.load(ref.at[row, here], layout=layout, optimized=False)

    def where(condition: Any, numbers: jax.Array) -> jax.Array:
        given = lax.broadcast_in_dim(condition, (width,), ())
        return lax.select_n(given, jnp.zeros_like(numbers), numbers)

    wide = lambda numbers: numbers.astype(jnp.float32)  # noqa: E731
    factors = [read(taps, j) for j in range(TAPS)]
    nothing = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)

    def one(row: Any, before: Any, sums: Any, inputs: Any, of_output: Any) -> tuple[Any, Any]:
        inputs, place = [*before, wide(inputs)], position[row]
        seen = [where(place >= TAPS - 1 - j, inputs[j]) for j in range(TAPS - 1)] + inputs[-1:]
        total = factors[0] * seen[0]
        for j in range(1, TAPS):
            total += factors[j] * seen[j]
        opened = 1 / (1 + jnp.exp(-total))
        given = (wide(of_output) * opened * (1 + total * (1 - opened))).astype(of_total.dtype)
        of_total.at[row, here][...] = given
        return inputs[1:], [a + wide(given) * b for a, b in zip(sums, seen, strict=True)]

    def some(turn: Any, carry: Any) -> Any:
        before, sums = carry
        rows = [first + turn * TOGETHER + i for i in range(TOGETHER)]
        read_now = [(read(x, row), read(of_y, row)) for row in rows]
        for row, (inputs, of_output) in zip(rows, read_now, strict=True):
            before, sums = one(row, before, sums, inputs, of_output)
        return before, sums

    before = [wide(read(x, jnp.maximum(first - back, 0))) for back in range(TAPS - 1, 0, -1)]
    _, sums = lax.fori_loop(0, TOKENS // TOGETHER, some, (before, [nothing] * TAPS))
    for j in range(TAPS):
        of_taps.at[lax.axis_index("block"), j, here][...] = sums[j]
