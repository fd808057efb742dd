"""Random MoE layers for tests, and their outputs in float64."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.core.numerics.swiglu import ClampedSwiGLU

BLOCK = 128


def moe_case(
    tokens: int,
    experts: int,
    top_k: int,
    *,
    features: int = 128,
    width: int = 64,
    layers: int = 2,
    dtype: Any = jnp.bfloat16,
    fp8: bool = False,
    biases: bool = False,
    seed: int = 0,
) -> tuple[Any, ...]:
    """(x, ids, weights, gate_up, down), and with `fp8` or `biases` a dict of scales or biases.

    With `layers=0` the weights are those of one layer. The ids of a token are distinct.
    """
    rng = np.random.default_rng(seed)
    stack = (layers, experts) if layers else (experts,)
    blocks = lambda size: -(-size // BLOCK)  # noqa: E731

    def draw(*shape: int, of: Any = dtype, scale: float = 1.0) -> Array:
        return jnp.asarray(rng.normal(size=shape) * scale, of)

    x = draw(tokens, features)
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    weights = jnp.asarray(rng.uniform(0.1, 1, size=(tokens, top_k)), jnp.float32)
    stored = jnp.float8_e4m3fn if fp8 else dtype
    inner, outer = features**-0.5, width**-0.5
    gate_up = draw(*stack, 2 * width, features, of=stored, scale=1.0 if fp8 else inner)
    down = draw(*stack, features, width, of=stored, scale=1.0 if fp8 else outer)
    args = (x, jnp.asarray(ids), weights, gate_up, down)
    if biases:
        return *args, {
            "gate_up_bias": draw(*stack, 2 * width),
            "down_bias": draw(*stack, features),
        }
    if not fp8:
        return args

    def scales(*shape: int, scale: float) -> Array:
        return jnp.asarray(rng.uniform(0.2, 2, size=(*stack, *shape)) * scale, jnp.float32)

    return *args, {
        "gate_up_scale": scales(2, blocks(width), blocks(features), scale=inner),
        "down_scale": scales(blocks(features), blocks(width), scale=outer),
    }


def _spread(scale: Array, rows: int, columns: int) -> np.ndarray:
    wide = np.asarray(scale, np.float64).repeat(BLOCK, -2).repeat(BLOCK, -1)
    return wide[..., :rows, :columns]


def expected(
    x: Array,
    ids: Array,
    weights: Array,
    gate_up: Array,
    down: Array,
    *,
    gate_up_scale: Array | None = None,
    down_scale: Array | None = None,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    activation: ClampedSwiGLU | None = None,
) -> np.ndarray:
    """The output, token by token and expert by expert, for one layer's weights.

    Intermediates are rounded to the operands' dtype.
    """
    rounded_to = gate_up.dtype if gate_up_scale is None else x.dtype
    features, width = down.shape[1:]
    out = np.zeros((x.shape[0], features))
    tokens = np.asarray(x, np.float64)
    for t, k in np.ndindex(*ids.shape):
        e = int(ids[t, k])
        if not 0 <= e < gate_up.shape[0]:
            continue
        first = np.asarray(gate_up[e], np.float64).reshape(2, width, features)
        second = np.asarray(down[e], np.float64)
        if gate_up_scale is not None and down_scale is not None:
            first = first * _spread(gate_up_scale[e], width, features)
            second = second * _spread(down_scale[e], features, width)
        gate, up = first @ tokens[t]
        if gate_up_bias is not None:
            gate, up = (gate, up) + np.asarray(gate_up_bias[e], np.float64).reshape(2, width)
        if activation is None:
            h = gate / (1 + np.exp(-gate)) * up
        else:
            gate, up = (
                np.minimum(gate, activation.limit),
                np.clip(up, -activation.limit, activation.limit),
            )
            h = gate / (1 + np.exp(-activation.alpha * gate)) * (up + 1)
        h = np.asarray(np.asarray(h, rounded_to), np.float64)
        y = second @ h
        if down_bias is not None:
            y = y + np.asarray(down_bias[e], np.float64)
        out[t] += float(weights[t, k]) * y
    return out
