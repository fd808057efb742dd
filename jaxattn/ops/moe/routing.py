"""Routing of tokens to experts with their weights, in float32 throughout.

Rounding the bias to bfloat16 would change the choice of experts.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.reverse_mode import in_reverse_mode_only
from jaxattn.core.validation.array_checks import check_array, check_sizes, finite
from jaxattn.kernels.moe.routing.router import LEAST, MOST_EXPERTS, route_mosaic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """The rule by which tokens choose experts.

    Attributes:
        experts: E, the number of experts.
        top_k: K, the number of experts per token.
        scores: "softmax" over the experts, or "sigmoid" of each (DeepSeek-V3).
        groups: Number of groups of consecutive experts.
        top_groups: Number of groups from which experts are chosen.
        best_of_group: A group's score is the sum of this many of its best experts' scores.
        normalize: Whether the chosen experts' weights are scaled to sum to 1.
        scale: Factor of the weights.

    Raises:
        ValueError: The numbers do not fit each other; the message names them.
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
        sizes = ("experts", "top_k", "groups", "top_groups", "best_of_group")
        check_sizes("Router", **{name: getattr(self, name) for name in sizes})
        finite("Router", "scale", self.scale)
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

    @property
    def choice(self) -> dict[str, Any]:
        """The options of `route_mosaic`."""
        fields = (field.name for field in dataclasses.fields(self))
        options = {x: getattr(self, x) for x in fields if x not in ("experts", "scores")}
        return {"sigmoid": self.scores == "sigmoid", **options}


def route(
    logits: Float[Array, "*T E"],
    bias: Float[Array, " E"] | None,
    router: Router,
    *,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "*T K"], Float[Array, "*T K"]]:
    """Returns the experts of each token, best first, and their weights in float32.

    If scores are equal, the expert with the lower id comes first. A token whose logits are all NaN
    gets NaN weights.

    Args:
        logits: Logits of the router, which are cast to float32.
        bias: Bias added to the scores for the choice only, not in the weights (DeepSeek-V3's
            `e_score_correction_bias`).
        router: The routing rule.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            The kernel requires a multiple of 32 experts, at most 1024, and supports gradients in
            reverse mode.

    Raises:
        TypeError, ValueError: An argument is not an array, or its shape does not fit.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    op = "route"
    if not isinstance(router, Router):
        raise TypeError(f"route: router must be a moe.Router, got {type(router).__name__}")
    check_array(op, "logits", logits)
    if bias is not None:
        check_array(op, "bias", bias)
    if logits.shape[-1] != router.experts:
        raise ValueError(f"route: logits {tuple(logits.shape)} must end in E = {router.experts}")
    if bias is not None and bias.shape != (router.experts,):
        raise ValueError(f"route: bias must be [E] = [{router.experts}], got {tuple(bias.shape)}")
    logits = logits.astype(jnp.float32)
    bias = None if bias is None else bias.astype(jnp.float32)

    def reference(logits: Array, bias: Array | None) -> tuple[Array, Array]:
        return _by_sorting(logits, bias, router)

    def mosaic(interpret: bool) -> tuple[Array, Array]:
        def kernel(logits: Array, bias: Array | None) -> Any:
            rows = logits.reshape(-1, router.experts)
            *chosen, _ = route_mosaic(rows, bias, **router.choice, interpret=interpret)
            return tuple(x.reshape(*logits.shape[:-1], router.top_k) for x in chosen)

        def weights_of(ids: Array, logits: Array, bias: Array | None) -> Array:
            del bias  # affects only the choice, not the weights
            return weights_of_chosen(logits, ids, router)

        return with_gradient_of_weights(weights_of, kernel)(logits, bias)

    with jax.named_scope(op):
        return dispatch_kernel(op, implementation, mosaic, lambda: reference(logits, bias))


def route_serves(experts: int) -> bool:
    """Returns whether the kernel supports this number of experts."""
    return experts % LEAST == 0 and 0 < experts <= MOST_EXPERTS


def _by_sorting(logits: Array, bias: Array | None, router: Router) -> tuple[Array, Array]:
    scores = _scores(logits, router)
    choice = scores if bias is None else scores + bias
    if router.top_groups < router.groups:
        choice = _of_best_groups(choice, router)
    _, ids = lax.top_k(choice, router.top_k)
    return ids.astype(jnp.int32), _weights(scores, ids, router)


def weights_of_chosen(
    logits: Float[Array, "*T E"], ids: Int[Array, "*T K"], router: Router
) -> Float[Array, "*T K"]:
    """Returns the weights of experts chosen already, so that the gradient contains no choice."""
    return _weights(_scores(logits, router), ids, router)


def with_gradient_of_weights(
    weights_of: Callable[..., Array], choose: Callable[..., tuple[Array, Array]]
) -> Callable[..., Any]:
    """Gives `choose(*operands)`, which returns ids and weights, a reverse-mode gradient.

    The gradient is that of `weights_of(ids, *operands)`, so the backward pass does not choose
    again.
    """
    differentiable = jax.custom_vjp(choose)

    def forward(*operands: Any) -> Any:
        ids, weights = choose(*operands)
        return (ids, weights), (ids, operands)

    def backward(kept: Any, cotangents: Any) -> Any:
        ids, operands = kept
        return jax.vjp(partial(weights_of, ids), *operands)[1](cotangents[1])

    differentiable.defvjp(forward, backward)
    return in_reverse_mode_only("route", differentiable, instead="pass implementation='xla'")


def _scores(logits: Array, router: Router) -> Array:
    return jax.nn.softmax(logits) if router.scores == "softmax" else jax.nn.sigmoid(logits)


def _weights(scores: Array, ids: Array, router: Router) -> Array:
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if router.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * router.scale


def _of_best_groups(choice: Array, router: Router) -> Array:
    """Returns `choice` with -inf for experts outside the best `top_groups` groups."""
    grouped = choice.reshape(*choice.shape[:-1], router.groups, -1)
    best, _ = lax.top_k(grouped, router.best_of_group)
    _, kept = lax.top_k(best.sum(-1), router.top_groups)
    mask = jax.nn.one_hot(kept, router.groups, dtype=jnp.bool_).any(-2)
    return jnp.where(mask[..., None], grouped, -jnp.inf).reshape(choice.shape)
