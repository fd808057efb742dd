"""RMS norm of the residual stream, its weight read from a stack of layers: a warpgroup per token.

The kernel may first add the previous layer's output to the stream: one launch instead of two. XLA
would copy a layer's weight out of the stack by a separate kernel before the norm.

A width that is an odd multiple of 64, as gpt-oss's 2,880, ends with a window of 128 features whose
first 64 also belong to the previous window. They count once, and both windows store the same
values.

Limits: 128 to 8192 features, a multiple of 64. Reference: `jaxattn.ops.linear.rms_norm`
(implementation="xla"); tests: tests/ops/test_norm.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal, without_gradient
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import require_hopper

THREADS, HALF = 128, 64
MOST_FEATURES = 8192  # 64 of them in each thread's registers


def norms_features(features: int) -> bool:
    """Whether the kernel has threads and registers for tokens of that width."""
    return features % HALF == 0 and THREADS <= features <= MOST_FEATURES


def op_of(added: jax.Array | None) -> str:
    """Returns the name of the op that was called, for errors: one of them adds to x."""
    return "rms_norm_layer" if added is None else "add_rms_norm_layer"


def rms_norm_mosaic(
    x: jax.Array,
    weights: jax.Array,
    *,
    added: jax.Array | None = None,
    layer: jax.Array | int,
    affine: tuple[int, int] = (1, 0),
    eps: float,
    dtype: Any,
    interpret: bool = False,
) -> tuple[jax.Array | None, jax.Array]:
    """Returns (x + added, its norm) on a Hopper GPU, as documented by
    `jaxattn.ops.linear.rms_norm`.

    `affine` (a, b): the layer is `a * layer + b`. Without `added` there is no sum.
    """
    op = op_of(added)
    require_hopper(op, interpret=interpret)
    features = x.shape[-1]
    if not norms_features(features) or x.size == 0:
        raise Refusal(
            f"{op}: the kernel needs a multiple of {HALF} features from {THREADS} to "
            f"{MOST_FEATURES}, and at least one token; got x {x.shape}"
        )
    x, added, weights = without_gradient(
        op, (x, added, weights), "x added weights", train_with="nn.RMSNorm"
    )
    tokens = x.reshape(-1, features)
    whole = features // THREADS * THREADS
    pieces = [(0, whole)]
    if whole < features:
        pieces.append((features - THREADS, THREADS))

    def load(ref: Any, start: int, size: int) -> jax.Array:
        vector = next(n for n in (4, 2, 1) if size % (n * THREADS) == 0)
        layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)
        part = ref.at[pl.ds(start, size)]
        return plgpu.load(part, layout=layout, optimized=False).astype(jnp.float32)

    def squares(values: jax.Array, start: int) -> jax.Array:
        if start:  # a window over features that were counted
            layout = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
            place = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=layout)
            values = jnp.where(place < HALF, 0.0, values)
        return jnp.sum(values * values)

    def body(x_ref, added_ref, weights_ref, layer_ref, affine_ref, sum_ref, out_ref) -> None:
        token = lax.axis_index("token")
        # Loaded before the layer's number has arrived, which the weight waits for.
        values = [load(x_ref.at[token], *piece) for piece in pieces]
        if added_ref is not None:
            added = [load(added_ref.at[token], *piece) for piece in pieces]
            values = [x + more for x, more in zip(values, added, strict=True)]
        norm = weights_ref.at[layer_ref[0] * affine_ref[0] + affine_ref[1]]
        weights = [load(norm, *piece) for piece in pieces]
        total = sum(squares(x, start) for x, (start, _) in zip(values, pieces, strict=True))
        factor = lax.rsqrt(total * (1.0 / features) + eps)
        for part, weight, (start, size) in zip(values, weights, pieces, strict=True):
            if sum_ref is not None:
                sum_ref.at[token, pl.ds(start, size)][...] = part
            out_ref.at[token, pl.ds(start, size)][...] = (part * factor * weight).astype(dtype)

    total = None if added is None else jax.ShapeDtypeStruct(tokens.shape, jnp.float32)
    out = launch(
        body,
        name="rms_norm",
        grid={"token": tokens.shape[0]},
        inputs={
            "x_ref": tokens,
            "added_ref": None if added is None else added.reshape(tokens.shape),
            "weights_ref": weights,
            "layer_ref": jnp.asarray(layer, jnp.int32).reshape(1),
            # An operand, so that all norms of a step are one kernel to compile.
            "affine_ref": jnp.asarray(affine, jnp.int32),
        },
        outputs={"sum_ref": total, "out_ref": jax.ShapeDtypeStruct(tokens.shape, dtype)},
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    summed = None if added is None else out["sum_ref"].reshape(x.shape)
    return summed, out["out_ref"].reshape(x.shape)
