"""Mixture of experts: which experts a token takes, and what they make of it.

    ids, weights = route(logits, bias, router)          [T, K] each
    y = mixture_of_experts(x, ids, weights, gate_up, down)

Routing is float32 throughout: a bias rounded to bfloat16 chooses other experts. Tokens are sorted
by expert, so that each expert multiplies its own rows (`jax.lax.ragged_dot`). This is the plain-JAX
path: any shape, any device, differentiable in reverse mode.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.core.checks import check_array
from jaxattn.core.fp8_blocks import dequantize
from jaxattn.core.layers import LayerOf

type Layer = int | Int[Array, ""] | LayerOf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """How tokens choose experts.

    Attributes:
        experts: E.
        top_k: K, experts per token.
        scores: "softmax" over the experts, or "sigmoid" of each (DeepSeek-V3).
        groups: experts are divided into so many groups of neighbours.
        top_groups: only experts of so many groups are chosen.
        best_of_group: a group's score is the sum of so many of its best experts' scores.
        normalize: the chosen experts' weights sum to 1.
        scale: factor of the weights.

    Raises:
        ValueError: the numbers do not fit each other; they are named.
    """

    experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid"]
    groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    normalize: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores must be 'softmax' or 'sigmoid'; got {self.scores!r}")
        if self.groups < 1 or self.experts % self.groups:
            raise ValueError(f"experts={self.experts} must be a multiple of groups={self.groups}")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups={self.top_groups} must be from 1 to groups={self.groups}")
        size = self.experts // self.groups
        if not 1 <= self.best_of_group <= size:
            raise ValueError(
                f"best_of_group={self.best_of_group} must be from 1 to {size}, the experts of a "
                "group"
            )
        if not 1 <= self.top_k <= self.top_groups * size:
            raise ValueError(
                f"top_k={self.top_k} must be from 1 to {self.top_groups * size}, the experts of "
                f"top_groups={self.top_groups} groups"
            )


def route(
    logits: Float[Array, "*T E"], bias: Float[Array, " E"] | None, router: Router
) -> tuple[Int[Array, "*T K"], Float[Array, "*T K"]]:
    """The experts of each token, best first, and their weights in float32.

    Args:
        logits: of the router; they are taken as float32.
        bias: added to the scores that choose, not to the weights (DeepSeek-V3's
            `e_score_correction_bias`).

    Raises:
        TypeError, ValueError: an argument is no array, or its shape does not fit.
    """
    check_array("route", "logits", logits)
    if logits.shape[-1] != router.experts:
        raise ValueError(f"route: logits {tuple(logits.shape)} must end in E = {router.experts}")
    if bias is not None and bias.shape != (router.experts,):
        raise ValueError(f"route: bias must be [E] = [{router.experts}], got {tuple(bias.shape)}")
    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits) if router.scores == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + bias.astype(jnp.float32)
    if router.top_groups < router.groups:
        choice = _of_best_groups(choice, router)
    _, ids = lax.top_k(choice, router.top_k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if router.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids.astype(jnp.int32), weights * router.scale


def _of_best_groups(choice: Array, router: Router) -> Array:
    """-inf for experts of other groups than the best `top_groups`."""
    grouped = choice.reshape(*choice.shape[:-1], router.groups, -1)
    best, _ = lax.top_k(grouped, router.best_of_group)
    _, kept = lax.top_k(best.sum(-1), router.top_groups)
    mask = jax.nn.one_hot(kept, router.groups, dtype=jnp.bool_).any(-2)
    return jnp.where(mask[..., None], grouped, -jnp.inf).reshape(choice.shape)


def mixture_of_experts(
    x: Float[Array, "T F"],
    ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    gate_up: Float[Array, "*L E 2I F"],
    down: Float[Array, "*L E F I"],
    *,
    gate_up_scale: Float[Array, "*L E 2 i f"] | None = None,
    down_scale: Float[Array, "*L E f i"] | None = None,
    layer: Layer | None = None,
) -> Float[Array, "T F"]:
    """Sum over a token's experts of `weights * down(silu(gate(x)) * up(x))`, in float32.

    Operands of the products have the weights' dtype, and x's if the weights are FP8; sums are
    float32. A token's experts are added in the order of `ids`, so its result does not depend on the
    other tokens.

    Differentiable in reverse mode.

    Args:
        ids: experts; a negative one adds exactly 0, and no weights are read for it.
        gate_up: the gate's I rows, then those of up. As published: [out, in].
        down: as published: [out, in].
        gate_up_scale, down_scale: of float8_e4m3fn weights, float32, of blocks of 128 x 128
            (`jaxattn.core.fp8_blocks`); gate and up have blocks of their own.
        layer: the weights are stacks of layers, and this is the layer's number.

    Raises:
        ValueError: the shapes do not fit; they are named.
    """
    if layer is not None:
        number = layer.index if isinstance(layer, LayerOf) else layer
        gate_up, down, gate_up_scale, down_scale = jax.tree.map(
            lambda stack: lax.dynamic_index_in_dim(stack, number, keepdims=False),
            (gate_up, down, gate_up_scale, down_scale),
        )
    (tokens, features), (experts, width) = x.shape, (down.shape[0], down.shape[-1])
    fits = gate_up.shape == (experts, 2 * width, features)
    if not fits or down.shape != (experts, features, width):
        raise ValueError(
            f"mixture_of_experts: of x {x.shape}, gate_up must be [E, 2 I, {features}] and down "
            f"[E, {features}, I]; got {gate_up.shape} and {down.shape}"
        )
    if gate_up_scale is not None and down_scale is not None:
        apart = dequantize(gate_up.reshape(experts, 2, width, features), gate_up_scale, x.dtype)
        gate_up = apart.reshape(gate_up.shape)
        down = dequantize(down, down_scale, x.dtype)
    if ids.shape != weights.shape or ids.shape[:1] != (tokens,):
        raise ValueError(
            f"mixture_of_experts: ids and weights must be [{tokens}, K], got {ids.shape} and "
            f"{weights.shape}"
        )
    chosen = jnp.where(ids < 0, experts, ids).reshape(-1)  # those of no expert come last
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.bincount(chosen, length=experts).astype(jnp.int32)
    rows = x.astype(gate_up.dtype)[order // ids.shape[1]]
    gate, up = jnp.split(_grouped(rows, gate_up, sizes), 2, axis=-1)
    out = _grouped((jax.nn.silu(gate) * up).astype(down.dtype), down, sizes)
    out = jnp.zeros_like(out).at[order].set(out).reshape(*ids.shape, features)
    return jnp.where(ids[..., None] < 0, 0, out * weights[..., None]).sum(1)


def _grouped(rows: Array, weights: Array, sizes: Array) -> Array:
    """Each group's rows [n, in] by its weights [out, in]."""
    exact = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return lax.ragged_dot_general(
        rows, weights, sizes, dimensions, precision=exact, preferred_element_type=jnp.float32
    )
