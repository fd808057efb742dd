"""The gradient of an RMS norm and of its weight, in one pass over the tokens.

    n = x / rms(x)
    y = n weight
    of_x = (g - n mean(g n)) / rms(x) + of_stream          g = of_y weight
    of_weight = sum of of_y n

of_stream is the gradient of x by the way of its other readers: in a residual layer the sum behind
the norm's branch. XLA computes mean(g n) in one kernel and the rest in another, which reads x and
of_y again.

A warpgroup has some tokens, one at a time, with 16 of 2,048 features in each thread. Four such CTAs
share a multiprocessor, so some load while others add up. A thread adds up its part of of_weight in
registers. CTAs write these sums, which XLA adds up in a fixed order.

A width that is an odd multiple of 64 ends with a window that repeats 64 features, as in
`kernels/linear/rms_norm.py`.

Limits: 128 to 7168 features, a multiple of 64; float32, bfloat16 or float16. XLA computes the rest.
Reference: `jaxattn.ops.linear.norm_branch`; tests: tests/ops/test_norm_branch.py.
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
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS, require_hopper
from jaxattn.kernels.linear.rms_norm import HALF, THREADS, norms_features

OP = "rms_norm_branch"
CTAS = 4 * NUM_SMS
MOST_WIDTH = 7168  # features for which a thread has registers
MOST_EARLY = 4096  # features up to which registers hold a token's of_stream from the beginning
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def rms_norm_gradient(
    x: jax.Array,
    weight: jax.Array,
    of_y: Sequence[jax.Array],
    of_stream: jax.Array | None = None,
    *,
    eps: float,
    rounded_to: Any = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Returns (of_x [N, F] in x's dtype, the same in another dtype, of_weight float32 [F]).

    Args:
        x: [N, F].
        weight: [F].
        of_y: The gradients of the norm's result by each of its readers, [N, F].
        of_stream: [N, F], added to of_x; None adds nothing.
        rounded_to: The other dtype. None returns None in its place.
    """
    require_hopper(OP, interpret=interpret)
    tokens, features = x.shape
    served = all(each.dtype in DTYPES for each in (x, weight, *of_y))
    if not (norms_features(features) and features <= MOST_WIDTH and served and x.size):
        raise Refusal(
            f"{OP}: the gradient kernel needs a multiple of {HALF} features from {THREADS} to "
            f"{MOST_WIDTH} in float32, bfloat16 or float16, and at least one token; got "
            f"x {x.dtype} {x.shape}"
        )
    blocks = min(tokens, CTAS)
    out = launch(
        functools.partial(gradient_of_tokens, eps),
        name="rms_norm_gradient",
        grid={"block": blocks},
        inputs={"x": x, "weight": weight, "of_y": tuple(of_y), "of_stream": of_stream},
        outputs={"of_x": jax.ShapeDtypeStruct(x.shape, x.dtype),
                 "rounded": rounded_to and jax.ShapeDtypeStruct(x.shape, rounded_to),
                 "of_weight": jax.ShapeDtypeStruct((blocks, features), jnp.float32)},
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True,
            unsafe_no_auto_barriers=True,  # a sum over threads has its own
        ),
        interpret=interpret,
    )  # fmt: skip
    return out["of_x"], out.get("rounded"), out["of_weight"].sum(axis=0)


def gradient_of_tokens(
    eps: float,
    x: Any,
    weight: Any,
    of_y: Any,
    of_stream: Any,
    of_x: Any,
    rounded: Any,
    of_weight: Any,
) -> None:
    (tokens, features), blocks = x.shape, of_weight.shape[0]
    block = lax.axis_index("block")
    whole = features // THREADS * THREADS
    windows = [(0, whole)] if whole == features else [(0, whole), (features - THREADS, THREADS)]
    layouts = [
        plgpu.Layout.WG_STRIDED(
            (size,), vec_size=next(n for n in (4, 2, 1) if size % (n * THREADS) == 0)
        )
        for _, size in windows
    ]

    def read(ref: Any) -> list[jax.Array]:
        return [
            plgpu.load(ref.at[pl.ds(*window)], layout=layout, optimized=False)
            for window, layout in zip(windows, layouts, strict=True)
        ]

    def total(rows: list[list[jax.Array]]) -> list[jax.Array]:
        wide = [[part.astype(jnp.float32) for part in parts] for parts in rows]
        return [functools.reduce(jnp.add, parts) for parts in zip(*wide, strict=True)]

    def mean(parts: list[jax.Array]) -> jax.Array:
        """The mean over all features, of which the last window repeats some."""
        if len(parts) > 1:
            place = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=layouts[1])
            parts = [parts[0], jnp.where(place < HALF, 0.0, parts[1])]
        return functools.reduce(jnp.add, [jnp.sum(part) for part in parts]) * (1 / features)

    def write(ref: Any, parts: list[jax.Array]) -> None:
        for part, window in zip(parts, windows, strict=True):
            ref.at[pl.ds(*window)][...] = part.astype(ref.dtype)

    def one(turn: Any, sums: list[jax.Array]) -> list[jax.Array]:
        token = block + turn * blocks
        loaded, gradients = read(x.at[token]), [read(ref.at[token]) for ref in of_y]
        stream = [] if of_stream is None else [of_stream.at[token]]
        early = features <= MOST_EARLY
        added = [read(ref) for ref in stream if early]
        # Read again for each token, from the cache: the registers hold sums instead.
        factors, values, given = total([read(weight)]), total([loaded]), total(gradients)
        of_normed = [a * b for a, b in zip(given, factors, strict=True)]
        inverse = lax.rsqrt(mean([part * part for part in values]) + eps)
        normed = [part * inverse for part in values]
        share = mean([a * b for a, b in zip(of_normed, normed, strict=True)])
        of_values = [inverse * (a - b * share) for a, b in zip(of_normed, normed, strict=True)]
        of_values = total([of_values, *added, *(read(ref) for ref in stream if not early)])
        for ref in (of_x, rounded):
            if ref is not None:
                write(ref.at[token], of_values)
        return [a + b * c for a, b, c in zip(sums, given, normed, strict=True)]

    nothing = [
        plgpu.layout_cast(jnp.zeros((size,), jnp.float32), layout)
        for (_, size), layout in zip(windows, layouts, strict=True)
    ]
    turns = lax.div(tokens - 1 - block, blocks) + 1
    write(of_weight.at[block], lax.fori_loop(0, turns, one, nothing))
