"""The gradient of a projection whose columns feed a causal convolution with SiLU, and of its taps.

    total = sum_j taps[j] x[t - (W - 1) + j]      of the token's own sequence, W = 4
    of_total = of_y silu'(total)
    of_x[t] = sum_j taps[j] of_total[t + (W - 1) - j]
    of_taps[j] = sum_t of_total[t] x[t - (W - 1) + j]

Columns after the convolution's pass their gradient on unchanged. So one launch writes the whole
gradient that the projection's gradients read, which XLA would concatenate.

A CTA has some tokens of some columns, and a thread 1 or 2 columns. Registers hold the tokens before
the current one, and the sums that wait for later tokens. A CTA also recomputes of_total of the next
CTA's first tokens. CTAs write their sums of taps, which XLA adds up in a fixed order.

Limits: bfloat16 or float16; 4 taps; parts of a multiple of 128 columns; 4,194,240 tokens. XLA
computes the rest.
Reference: `jaxattn.ops.gdn.causal_conv1d`; tests: tests/ops/gdn/test_conv.py.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.hopper.silu import sigmoid_and_slope

OP = "causal_conv1d"
THREADS, TAPS = 128, 4
TOKENS, TOGETHER = 64, 4  # tokens of a CTA, and those that are loaded ahead together
MOST_TOKENS = 65535 * TOKENS  # the most CTAs on CUDA's second axis


def conv_gradient(
    x: jax.Array,
    of_parts: Sequence[jax.Array],
    taps: jax.Array,
    position: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns (of_x [N, C] in x's dtype, of_taps float32 [W, Dc]).

    Args:
        x: [N, C]; its first Dc columns are convolved.
        of_parts: Gradients of adjacent groups of columns of the result, [N, C_i] each, C in all. A
            group is either convolved or not.
        taps: [W, Dc], the last of which is the token's own.
        position: int32 [N], the index of each token in its sequence.
    """
    require_hopper(OP, interpret=interpret)
    (tokens, columns), channels = x.shape, taps.shape[1]
    widths = [part.shape[1] for part in of_parts]
    served = x.dtype in (jnp.bfloat16, jnp.float16) and len(taps) == TAPS
    if not served or any(n % THREADS for n in widths) or not 0 < tokens <= MOST_TOKENS:
        raise Refusal(
            f"{OP}: the gradient kernel does not support x {x.dtype} {x.shape} with {len(taps)} "
            "taps"
        )
    of_parts = [part.astype(x.dtype) for part in of_parts]
    more = -tokens % TOKENS
    if more:  # padding adds nothing, as its gradient is 0
        x, *of_parts = (jnp.pad(each, ((0, more), (0, 0))) for each in (x, *of_parts))
        position = jnp.pad(position, (0, more))
    vector = next(n for n in (2, 1) if all(width % (n * THREADS) == 0 for width in widths))
    blocks = len(x) // TOKENS
    out = launch(
        functools.partial(gradient_of_tokens, vector),
        name="conv_gradient",
        grid={"block": blocks, "part": columns // (vector * THREADS)},
        inputs={"x": x, "of_parts": tuple(of_parts), "taps": taps.astype(jnp.float32),
                "position": position},
        outputs={"of_x": jax.ShapeDtypeStruct(x.shape, x.dtype),
                 "of_taps": jax.ShapeDtypeStruct((blocks, TAPS, channels), jnp.float32)},
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True,
            unsafe_no_auto_barriers=True,  # no thread reads what another has written
        ),
        interpret=interpret,
    )  # fmt: skip
    return out["of_x"][:tokens], out["of_taps"].sum(axis=0)


def gradient_of_tokens(
    vector: int, x: Any, of_parts: Any, taps: Any, position: Any, of_x: Any, of_taps: Any
) -> None:
    width, (tokens, _) = vector * THREADS, x.shape
    column, first = lax.axis_index("part") * width, lax.axis_index("block") * TOKENS
    here = pl.ds(pl.multiple_of(column, width), width)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)
    ends = list(accumulate(part.shape[1] for part in of_parts))

    def read(ref: Any, row: Any, columns: Any = here) -> jax.Array:
        return plgpu.load(ref.at[row, columns], layout=layout, optimized=False)

    def read_gradients(rows: list[Any]) -> Any:
        def read_part(ref: Any, end: int) -> tuple[jax.Array, ...]:
            own = pl.ds(pl.multiple_of(column - (end - ref.shape[1]), width), width)
            return tuple(read(ref, row, own) for row in rows)

        number = sum((column >= end).astype(jnp.int32) for end in ends[:-1])
        branches = [
            functools.partial(read_part, *pair) for pair in zip(of_parts, ends, strict=True)
        ]
        return lax.switch(number, branches) if len(branches) > 1 else branches[0]()

    def where(condition: Any, numbers: jax.Array) -> jax.Array:
        given = lax.broadcast_in_dim(condition, (width,), ())
        return lax.select_n(given, jnp.zeros_like(numbers), numbers)

    def rows_of(turn: Any) -> list[Any]:
        return [first + turn * TOGETHER + i for i in range(TOGETHER)]

    @pl.when(column >= taps.shape[1])
    def _copy() -> None:
        def some(turn: Any, _: Any) -> None:
            rows = rows_of(turn)
            for row, numbers in zip(rows, read_gradients(rows), strict=True):
                of_x.at[row, here][...] = numbers

        lax.fori_loop(0, TOKENS // TOGETHER, some, None)

    @pl.when(column < taps.shape[1])
    def _convolve() -> None:
        wide = lambda numbers: numbers.astype(jnp.float32)  # noqa: E731
        factors = [read(taps, j) for j in range(TAPS)]
        nothing = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)

        def one(place: Any, inputs: Any, of_y: Any, carry: Any) -> tuple[Any, jax.Array]:
            """Returns the next carry, and of_x of the token three before."""
            before, waiting, sums = carry
            inputs = [*before, wide(inputs)]
            met = [place >= TAPS - 1 - j for j in range(TAPS - 1)]
            seen = [where(*pair) for pair in zip(met, inputs[:-1], strict=True)] + inputs[-1:]
            total = factors[0] * seen[0]
            for j in range(1, TAPS):
                total += factors[j] * seen[j]
            given = wide(of_y) * sigmoid_and_slope(total)[1]
            back = [where(met[j], factors[j] * given) for j in range(TAPS - 1)]
            done, *waiting = [a + b for a, b in zip(waiting, back, strict=True)]
            sums = [a + given * b for a, b in zip(sums, seen, strict=True)]
            return (inputs[1:], [*waiting, factors[-1] * given], sums), done

        def some(turn: Any, carry: Any, unwritten: int = 0) -> Any:
            rows = rows_of(turn)
            read_now = zip([read(x, row) for row in rows], read_gradients(rows), strict=True)
            for i, (row, (inputs, of_y)) in enumerate(zip(rows, read_now, strict=True)):
                carry, done = one(position[row], inputs, of_y, carry)
                if i >= unwritten:
                    of_x.at[row - (TAPS - 1), here][...] = done.astype(of_x.dtype)
            return carry

        before = [wide(read(x, jnp.maximum(first - back, 0))) for back in range(TAPS - 1, 0, -1)]
        carry = before, [nothing] * (TAPS - 1), [nothing] * TAPS
        # The rows before belong to another CTA.
        carry = some(0, carry, unwritten=TAPS - 1)
        carry = lax.fori_loop(1, TOKENS // TOGETHER, some, carry)
        for j, numbers in enumerate(carry[2]):
            of_taps.at[lax.axis_index("block"), j, here][...] = numbers
        for i in range(TAPS - 1):
            row = jnp.minimum(first + TOKENS + i, tokens - 1)
            place = jnp.where(first + TOKENS < tokens, position[row], 0)
            (of_y,) = read_gradients([row])
            carry, done = one(place, read(x, row), of_y, carry)
            of_x.at[first + TOKENS + i - (TAPS - 1), here][...] = done.astype(of_x.dtype)
