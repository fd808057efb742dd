"""RMS norm of the residual stream, its weight read from a stack of layers: a warpgroup a token.

XLA copies a layer's weight out of the stack by a kernel of its own before it norms; this is one.

Limits: 128 to 8192 features, a multiple of 128. Reference: `jaxattn.ops.norm.rms_norm_layer`
(implementation="xla"); tests: tests/ops/test_norm.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal, without_gradient
from jaxattn.kernels.hopper.launch import launch
from jaxattn.kernels.hopper.machine import require_hopper

THREADS = 128
MOST_FEATURES = 8192  # 64 of them in each thread's registers


def norms_features(features: int) -> bool:
    """Whether the kernel has threads and registers for tokens of that width."""
    return features % THREADS == 0 and 0 < features <= MOST_FEATURES


def rms_norm_mosaic(
    x: jax.Array,
    weights: jax.Array,
    *,
    layer: jax.Array | int,
    affine: tuple[int, int] = (1, 0),
    eps: float,
    dtype: Any,
    interpret: bool = False,
    detect_races: bool = False,
) -> jax.Array:
    """`jaxattn.ops.norm.rms_norm_layer` on a Hopper GPU; arguments are documented there.

    `affine` (a, b): the layer is `a * layer + b`.
    """
    require_hopper("rms_norm_layer", interpret=interpret)
    features = x.shape[-1]
    if not norms_features(features) or x.size == 0:
        raise Refusal(
            f"rms_norm_layer: the kernel has a multiple of {THREADS} features, at most "
            f"{MOST_FEATURES}, and some tokens; got x {x.shape}"
        )
    x, weights = without_gradient("rms_norm_layer", (x, weights))
    tokens = x.reshape(-1, features)
    vector = next(n for n in (4, 2, 1) if features % (n * THREADS) == 0)
    layout = plgpu.Layout.WG_STRIDED((features,), vec_size=vector)

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def body(x_ref: Any, weights_ref: Any, layer_ref: Any, out_ref: Any) -> None:
        token = lax.axis_index("token")
        # Read before the layer's number is there, which the weight waits for.
        values = load(x_ref.at[token])
        weight = load(weights_ref.at[layer_ref[0] * affine[0] + affine[1]])
        factor = lax.rsqrt(jnp.sum(values * values) * (1.0 / features) + eps)
        out_ref.at[token][...] = (values * factor * weight).astype(dtype)

    number = jnp.asarray(layer, jnp.int32).reshape(1)
    out = launch(
        body,
        name="rms_norm",
        grid={"token": tokens.shape[0]},
        inputs={"x_ref": tokens, "weights_ref": weights, "layer_ref": number},
        outputs={"out_ref": jax.ShapeDtypeStruct(tokens.shape, dtype)},
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        detect_races=detect_races,
    )["out_ref"]
    return out.reshape(x.shape)
