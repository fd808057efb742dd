"""A causal convolution with SiLU of the first columns of a projection, for packed sequences.

    y[t] = silu(sum_j taps[j] x[t - (W - 1) + j])      of the token's own sequence, W = 4

Inputs before a sequence are those of its history, or zeros. A CTA has some tokens of some columns,
and a thread 1, 2 or 4 columns. Registers hold the three tokens before the current one, and the next
tokens' inputs, which are loaded while the current ones are computed.

Limits: bfloat16 or float16; 4 taps; outputs of a multiple of 128 columns; 4,194,240 tokens. XLA
computes the rest.
Reference: `jaxattn.ops.gdn.causal_conv1d`; tests: tests/ops/gdn/test_packed_conv1d.py.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.gdn.column_groups import use_group
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS, require_hopper
from jaxattn.kernels.hopper.silu import sigmoid

OP = "causal_conv1d"
THREADS, TAPS = 128, 4
TOGETHER = 4  # tokens that are loaded ahead together
TOKENS = (128, 64, 32, 16)  # tokens of a CTA: the most that give CTAS
CTAS = 4 * NUM_SMS
MOST_TOKENS = 65535 * 64  # CUDA's second axis has 65,535 CTAs


def refuse(x: jax.Array, taps: jax.Array, widths: Sequence[int], *, interpret: bool) -> None:
    """Raises `Refusal` with the reason if the kernel does not support this call."""
    require_hopper(OP, interpret=interpret)
    served = x.dtype in (jnp.bfloat16, jnp.float16) and len(taps) == TAPS
    if not served or any(n % THREADS for n in widths) or not 0 < len(x) <= MOST_TOKENS:
        raise Refusal(
            f"{OP}: the kernel does not support x {x.dtype} {x.shape} with {len(taps)} taps and "
            f"results of {', '.join(map(str, widths))} columns"
        )


def conv_forward(
    x: jax.Array,
    taps: jax.Array,
    position: jax.Array,
    widths: Sequence[int],
    *,
    history: tuple[jax.Array, jax.Array] | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns arrays [N, widths[i]] in x's dtype, adjacent groups of the convolved columns.

    Args:
        x: [N, C]; its first Dc columns are convolved.
        taps: [W, Dc], the last of which is the token's own.
        position: int32 [N], the index of each token in its sequence. A sequence's tokens are
            adjacent.
        widths: Number of columns of each result, Dc in all.
        history: (inputs [n, W - 1, Dc] before each sequence, oldest first; int32 [N], the sequence
            of each token). None means zeros.

    Raises:
        Refusal: The kernel does not support this call.
    """
    refuse(x, taps, widths, interpret=interpret)
    tokens = len(x)
    fits = (all(n % (v * THREADS) == 0 for n in widths) and x.shape[1] % v == 0 for v in (4, 2, 1))
    vector = next(v for v, fit in zip((4, 2, 1), fits, strict=True) if fit)
    before, sequence = (None, None) if history is None else history
    parts = sum(widths) // (vector * THREADS)
    own = next((n for n in TOKENS if pl.cdiv(tokens, n) * parts >= CTAS), TOKENS[-1])
    return launch(
        functools.partial(convolve_tokens, vector, own),
        name="conv_forward",
        grid={"block": pl.cdiv(tokens, own), "part": parts},
        inputs={"x": x, "taps": taps.astype(jnp.float32), "position": position,
                "history": None if before is None else before.astype(x.dtype),
                "sequence": sequence},
        outputs={"results": tuple(jax.ShapeDtypeStruct((tokens, n), x.dtype) for n in widths)},
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True,
            unsafe_no_auto_barriers=True,  # no thread reads what another has written
        ),
        interpret=interpret,
    )["results"]  # fmt: skip


def convolve_tokens(
    vector: int,
    own: int,
    x: Any,
    taps: Any,
    position: Any,
    history: Any,
    sequence: Any,
    results: Any,
) -> None:
    width, (tokens, _) = vector * THREADS, x.shape
    column, first = lax.axis_index("part") * width, lax.axis_index("block") * own
    here = pl.ds(pl.multiple_of(column, width), width)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)

    def read(ref: Any, *index: Any) -> jax.Array:
        numbers = plgpu.load(ref.at[*index, here], layout=layout, optimized=False)
        return numbers.astype(jnp.float32)

    def before_sequence(row: Any, which: Any) -> jax.Array:
        """The input at `which` of the W - 1 inputs before the sequence of a token."""
        if history is None:
            return plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
        return read(history, sequence[row], which)

    def before_token(row: Any, place: Any, back: int) -> jax.Array:
        return lax.cond(
            place >= back,
            lambda: read(x, jnp.maximum(row - back, 0)),
            lambda: before_sequence(row, TAPS - 1 + place - back),
        )

    def load_ahead(turn: Any) -> tuple[list[Any], list[jax.Array]]:
        rows = [jnp.minimum(first + turn * TOGETHER + i, tokens - 1) for i in range(TOGETHER)]
        loaded = [plgpu.load(x.at[row, here], layout=layout, optimized=False) for row in rows]
        return [position[row] for row in rows], loaded

    def write(turn: Any, numbers: list[jax.Array]) -> None:
        def to(ref: Any, there: Any) -> None:
            for i, each in enumerate(numbers):
                row = first + turn * TOGETHER + i

                @pl.when(row < tokens)
                def _store(row: Any = row, each: Any = each) -> None:
                    ref.at[row, there][...] = each.astype(ref.dtype)

        use_group(results, column, width, to)

    def convolve(turn: Any, before: list[jax.Array], ahead: Any) -> list[jax.Array]:
        numbers = []
        for i, (place, last) in enumerate(zip(*ahead, strict=True)):
            row = jnp.minimum(first + turn * TOGETHER + i, tokens - 1)
            before = lax.cond(
                place == 0,
                lambda row=row: [before_sequence(row, j) for j in range(TAPS - 1)],
                lambda before=before: before,
            )
            inputs = [*before, last.astype(jnp.float32)]
            total = factors[0] * inputs[0]
            for j in range(1, TAPS):
                total += factors[j] * inputs[j]
            numbers.append(total * sigmoid(total))
            before = inputs[1:]
        write(turn, numbers)
        return before

    factors = [read(taps, j) for j in range(TAPS)]
    place = position[first]
    before = [before_token(first, place, back) for back in range(TAPS - 1, 0, -1)]

    def step(turn: Any, carry: Any) -> Any:
        before, ahead = carry
        following = load_ahead(turn + 1)
        return convolve(turn, before, ahead), following

    turns = own // TOGETHER
    before, ahead = lax.fori_loop(0, turns - 1, step, (before, load_ahead(0)))
    convolve(turns - 1, before, ahead)
