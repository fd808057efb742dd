"""The gradient of a projection whose columns feed a causal convolution with SiLU, and of its taps.

    total = sum_j taps[j] x[t - (W - 1) + j]      of the token's own sequence, W = 4
    of_total = of_y silu'(total)
    of_x[t] = sum_j taps[j] of_total[t + (W - 1) - j]
    of_taps[j] = sum_t of_total[t] x[t - (W - 1) + j]

Columns after the convolution's pass their gradient on unchanged. So one launch writes the whole
gradient that the projection's gradients read, which XLA would concatenate.

A CTA has 64 tokens of some columns. TMA copies their inputs and gradients to a ring of stages. A
thread has 1 or 2 columns. Registers hold the tokens before the current one, and the sums that wait
for later tokens. Where no sequence begins in a step or right before it, no sum is masked. A CTA
also recomputes of_total of the next CTA's first tokens. CTAs write their sums of taps, which XLA
adds up in a fixed order.

Limits: bfloat16 or float16; 4 taps; parts of a multiple of 128 columns; 4,194,240 tokens. XLA
computes the rest.
Reference: `jaxattn.ops.gdn.packed_conv1d`; tests: tests/ops/gdn/test_packed_conv1d.py.
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
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.hopper.silu import sigmoid_and_slope

OP = "causal_conv1d"
THREADS, TAPS = 128, 4
TOKENS, STEP = 64, 16  # tokens of a CTA, and those of a copy to shared memory
STEPS, STAGES, UNROLLED = TOKENS // STEP, 3, 4
COPIED = 16  # tokens whose gradient is passed on together
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
        scratch={"x_smem": plgpu.SMEM((STAGES, STEP, vector * THREADS), x.dtype),
                 "of_y_smem": plgpu.SMEM((STAGES, STEP, vector * THREADS), x.dtype),
                 "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES)},
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True,
            unsafe_no_auto_barriers=True,  # no thread reads what another has written
        ),
        interpret=interpret,
    )  # fmt: skip
    return out["of_x"][:tokens], out["of_taps"].sum(axis=0)


def gradient_of_tokens(
    vector: int,
    x: Any,
    of_parts: Any,
    taps: Any,
    position: Any,
    of_x: Any,
    of_taps: Any,
    x_smem: Any,
    of_y_smem: Any,
    loaded: Any,
) -> None:
    width, (tokens, _) = vector * THREADS, x.shape
    column, first = lax.axis_index("part") * width, lax.axis_index("block") * TOKENS
    here = pl.ds(pl.multiple_of(column, width), width)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)

    def load(ref: Any, row: Any, columns: Any = here) -> jax.Array:
        return plgpu.load(ref.at[row, columns], layout=layout, optimized=False)

    def load_row(row: Any, ref: Any, columns: Any) -> jax.Array:
        return load(ref, row, columns)

    with_gradients = functools.partial(use_group, of_parts, column, width)

    @pl.when(column >= taps.shape[1])
    def _copy() -> None:
        @pl.loop(0, TOKENS // COPIED)
        def _(turn: Any) -> None:
            rows = [first + turn * COPIED + i for i in range(COPIED)]
            given = with_gradients(lambda ref, own: tuple(load(ref, row, own) for row in rows))
            for row, numbers in zip(rows, given, strict=True):
                of_x.at[row, here][...] = numbers

    @pl.when(column < taps.shape[1])
    def _convolve() -> None:
        wide = lambda numbers: numbers.astype(jnp.float32)  # noqa: E731
        factors = [load(taps, j) for j in range(TAPS)]
        nothing = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)

        def copy(turn: Any) -> None:
            slot, rows = lax.rem(turn, jnp.int32(STAGES)), pl.ds(first + turn * STEP, STEP)
            plgpu.copy_gmem_to_smem(x.at[rows, here], x_smem.at[slot], loaded.at[slot])

            def copy_gradients(ref: Any, own: Any) -> None:
                plgpu.copy_gmem_to_smem(ref.at[rows, own], of_y_smem.at[slot], loaded.at[slot])

            with_gradients(copy_gradients)

        def where(condition: Any, numbers: jax.Array) -> jax.Array:
            return lax.select_n(lax.broadcast_in_dim(condition, (width,), ()), nothing, numbers)

        def one(inputs: Any, of_y: Any, carry: Any, place: Any = None) -> tuple[Any, jax.Array]:
            """Returns the next carry, and of_x of the token three before.

            Without `place`, the three tokens before are of the same sequence.
            """
            before, waiting, sums = carry
            inputs = [*before, wide(inputs)]

            def of_sequence(numbers: list[jax.Array]) -> list[jax.Array]:
                if place is None:
                    return numbers
                met = (place >= TAPS - 1 - j for j in range(TAPS - 1))
                return [where(*pair) for pair in zip(met, numbers, strict=True)]

            seen = of_sequence(inputs[:-1]) + inputs[-1:]
            total = factors[0] * seen[0]
            for j in range(1, TAPS):
                total += factors[j] * seen[j]
            given = wide(of_y) * sigmoid_and_slope(total)[1]
            back = of_sequence([factors[j] * given for j in range(TAPS - 1)])
            done, *waiting = [a + b for a, b in zip(waiting, back, strict=True)]
            sums = [a + given * b for a, b in zip(sums, seen, strict=True)]
            return (inputs[1:], [*waiting, factors[-1] * given], sums), done

        def some(turn: Any, carry: Any, unwritten: int, masked: bool) -> Any:
            slot = lax.rem(turn, jnp.int32(STAGES))

            def rows(group: Any, carry: Any, unwritten: int = 0) -> Any:
                for i in range(UNROLLED):
                    at = group * UNROLLED + i
                    row = first + turn * STEP + at
                    inputs, of_y = (
                        load(ref.at[slot], at, slice(None)) for ref in (x_smem, of_y_smem)
                    )
                    carry, done = one(inputs, of_y, carry, position[row] if masked else None)
                    if i >= unwritten:
                        of_x.at[row - (TAPS - 1), here][...] = done.astype(of_x.dtype)
                return carry

            if unwritten:
                carry = rows(0, carry, unwritten)
            return lax.fori_loop(int(unwritten > 0), STEP // UNROLLED, rows, carry)

        def step(turn: Any, carry: Any, unwritten: int = 0) -> Any:
            place, carry = carry
            following = position[first + jnp.minimum(turn + 2, STEPS) * STEP - 1]
            plgpu.barrier_wait(loaded.at[lax.rem(turn, jnp.int32(STAGES))])
            carry = lax.cond(
                place >= STEP - 1 + TAPS - 1,
                lambda: some(turn, carry, unwritten, masked=False),
                lambda: some(turn, carry, unwritten, masked=True),
            )
            plgpu.commit_smem()  # all threads have read the stage before TMA writes to it again

            @pl.when(turn + STAGES < STEPS)
            def _refill() -> None:
                copy(turn + STAGES)

            return following, carry

        for turn in range(STAGES):
            copy(jnp.int32(turn))
        before = [wide(load(x, jnp.maximum(first - back, 0))) for back in range(TAPS - 1, 0, -1)]
        carry = position[first + STEP - 1], (before, [nothing] * (TAPS - 1), [nothing] * TAPS)
        # The rows before belong to another CTA.
        carry = step(jnp.int32(0), carry, unwritten=TAPS - 1)

        _, carry = lax.fori_loop(1, STEPS, step, carry)
        for j, numbers in enumerate(carry[2]):
            of_taps.at[lax.axis_index("block"), j, here][...] = numbers
        for i in range(TAPS - 1):
            row = jnp.minimum(first + TOKENS + i, tokens - 1)
            place = jnp.where(first + TOKENS < tokens, position[row], 0)
            of_y = with_gradients(functools.partial(load_row, row))
            carry, done = one(load(x, row), of_y, carry, place)
            of_x.at[first + TOKENS + i - (TAPS - 1), here][...] = done.astype(of_x.dtype)
