"""RMS norm of the residual stream, its weight read from a stack of layers: a warpgroup per token.

What the layer before adds to the stream may be added here first: one launch instead of two. XLA
would copy a layer's weight out of the stack by a kernel of its own before it norms.

Limits: 128 to 8192 features, a multiple of 128. Reference: `jaxattn.ops.linear.rms_norm`
(implementation="xla"); tests: tests/ops/test_norm.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal, without_gradient
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import require_hopper

THREADS = 128
MOST_FEATURES = 8192  # 64 of them in each thread's registers


def norms_features(features: int) -> bool:
    """Whether the kernel has threads and registers for tokens of that width."""
    return features % THREADS == 0 and 0 < features <= MOST_FEATURES


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
    detect_races: bool = False,
) -> tuple[jax.Array | None, jax.Array]:
    """(x + added, its norm) on a Hopper GPU, as `jaxattn.ops.linear.rms_norm` documents it.

    `affine` (a, b): the layer is `a * layer + b`. Without `added` there is no sum.
    """
    require_hopper("rms_norm_layer", interpret=interpret)
    features = x.shape[-1]
    if not norms_features(features) or x.size == 0:
        raise Refusal(
            f"rms_norm_layer: the kernel has a multiple of {THREADS} features, at most "
            f"{MOST_FEATURES}, and some tokens; got x {x.shape}"
        )
    x, added, weights = without_gradient(
        "rms_norm_layer", (x, added, weights), "x added weights", train_with="nn.RMSNorm"
    )
    tokens = x.reshape(-1, features)
    vector = next(n for n in (4, 2, 1) if features % (n * THREADS) == 0)
    layout = plgpu.Layout.WG_STRIDED((features,), vec_size=vector)

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def body(x_ref, added_ref, weights_ref, layer_ref, affine_ref, sum_ref, out_ref) -> None:
        token = lax.axis_index("token")
        # Read before the layer's number is there, which the weight waits for.
        values = load(x_ref.at[token])
        if added_ref is not None:
            values += load(added_ref.at[token])
        weight = load(weights_ref.at[layer_ref[0] * affine_ref[0] + affine_ref[1]])
        factor = lax.rsqrt(jnp.sum(values * values) * (1.0 / features) + eps)
        if sum_ref is not None:
            sum_ref.at[token][...] = values
        out_ref.at[token][...] = (values * factor * weight).astype(dtype)

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
        detect_races=detect_races,
    )
    summed = None if added is None else out["sum_ref"].reshape(x.shape)
    return summed, out["out_ref"].reshape(x.shape)
