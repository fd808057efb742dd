"""Forward and backward passes of layers of `jaxattn.nn`, for `bench train`.

Widths are Qwen3.5-35B's and DeepSeek-V2-Lite's. The gradients are those of the input and of all
parameters, which are bfloat16. `relative L2` compares them with those of the same layer in float32,
for a few tokens. TFLOP/s counts the products with parameters, and only a token's own experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxattn import nn
from jaxattn.bench.layers.gradients.gradient_timing import (
    gradient_columns,
    relative_l2,
    value_and_gradient,
)
from jaxattn.bench.layers.gradients.op_gradients import CHECKED, draw, label
from jaxattn.core.dispatch import Implementation
from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.moe import Router

MOST_ERROR = 5e-2
Shape = tuple[str, int, int]  # the layer, rows, tokens of each
HIDDEN, TAKEN = 2048, 9  # features, and experts per token, including the shared one
SHAPES: tuple[Shape, ...] = (
    ("hybrid layer", 1, 8192),
    ("delta net", 1, 8192),
    ("gated attention", 1, 8192),
    ("latent attention", 1, 8192),
    ("experts layer", 1, 8192),
)
MORE_SHAPES: tuple[Shape, ...] = ()
SMALL_SHAPES: tuple[Shape, ...] = (("small", 1, 24),)


class HybridLayer(nnx.Module):
    """A layer of Qwen3.5-35B: a delta net and experts, each after a norm and with a residual."""

    def __init__(self, **options: Any):
        self.norms = nnx.List([nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)])
        self.parts = nnx.List([delta_net(**options), qwen_experts(**options)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


def delta_net(**options: Any) -> nnx.Module:
    return nn.GatedDeltaNet(HIDDEN, 16, 32, **options)


def qwen_experts(**options: Any) -> nnx.Module:
    router = Router(experts=256, top_k=TAKEN - 1, scores="softmax", normalize=True)
    return nn.MixtureOfExperts(HIDDEN, 512, router, shared_size=512, shared_gate=True, **options)


LAYERS: dict[str, tuple[int, Callable[..., nnx.Module]]] = {
    "hybrid layer": (HIDDEN, HybridLayer),
    "delta net": (HIDDEN, delta_net),
    "gated attention": (
        HIDDEN,
        partial(
            nn.GroupedQueryAttention, HIDDEN, 16, 2, 256, rope=RopeConfig(dim=64), gated=True,
            qk_norm=True,
        ),
    ),
    "latent attention": (HIDDEN, partial(nn.MultiHeadLatentAttention, HIDDEN, 16)),
    "experts layer": (HIDDEN, qwen_experts),
    "small": (64, partial(nn.GatedMLP, 64, 64)),
}  # fmt: skip


def passes(name: str, rows: int, tokens: int, dtype: Any) -> tuple[Any, ...]:
    """(the layer's function of parameters and input, both, the other arrays, a cotangent)."""
    hidden, make = LAYERS[name]

    def new_layer() -> nnx.Module:
        return make(rngs=nnx.Rngs(0), dtype=dtype, param_dtype=dtype)

    definition = nnx.split(jax.eval_shape(new_layer), nnx.Param, ...)[0]
    new = jax.jit(lambda: nnx.split(new_layer(), nnx.Param, ...)[1:])
    params, rest = new()

    def function(floats: Any, fixed: Any) -> jax.Array:
        module: Any = nnx.merge(definition, floats["params"], fixed)
        out: jax.Array = module(floats["x"])
        return out

    floats = {"params": params, "x": draw(0, rows, tokens, hidden, dtype=jnp.float32)}
    return function, floats, rest, draw(9, rows, tokens, hidden, dtype=jnp.float32)


def met_by_a_token(parameter: jax.Array) -> float:
    """The numbers of a parameter that a token is multiplied with; expert stacks have 3 axes."""
    if parameter.ndim < 2:
        return 0
    of_experts = parameter.ndim == 3 and parameter.shape[0] > TAKEN
    return parameter.size * (TAKEN / parameter.shape[0] if of_experts else 1)


def measure(
    shape: Shape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table. A layer chooses its implementations itself."""
    del implementation, xla
    name, rows, tokens = shape
    found, wanted = (
        jax.jit(value_and_gradient(function))(*operands)[1]
        for function, *operands in (
            passes(name, 1, min(CHECKED, tokens), dtype) for dtype in (jnp.bfloat16, jnp.float32)
        )
    )
    function, floats, rest, cotangent = passes(name, rows, tokens, jnp.bfloat16)
    count = sum(x.size for x in jax.tree.leaves(floats["params"]))
    met = sum(met_by_a_token(x) for x in jax.tree.leaves(floats["params"]))
    row: dict[str, Any] = {**label(shape), "parameters": f"{count / 1e6:.1f}M"}
    row |= gradient_columns(function, floats, rest, cotangent)
    time = row["ms"] * 1e-3
    row["TFLOP/s"] = 6 * met * rows * tokens / time / 1e12
    row["GB/s"] = 2 * sum(x.nbytes for x in jax.tree.leaves(floats)) / time / 1e9
    row["relative L2"] = relative_l2(found, wanted)
    return row
