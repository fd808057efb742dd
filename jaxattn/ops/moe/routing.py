"""Routing of tokens to experts with their weights, float32 throughout.

A bias rounded to bfloat16 chooses other experts.
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
    """How a router chooses the experts of a token.

    Attributes:
        experts: E.
        top_k: K, experts per token.
        scores: "softmax" over the experts, or "sigmoid" of each score (DeepSeek-V3).
        groups: the number of groups of neighboring experts.
        top_groups: the number of groups from which the router chooses experts.
        best_of_group: the number of best experts whose scores sum to the score of a group.
        normalize: whether the weights of the chosen experts sum to 1.
        scale: factor of the weights.

    Raises:
        ValueError: the numbers are inconsistent; the message names them.
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
    """The experts of each token, best first, and their weights in float32.

    Among equal scores, the expert with the lower id comes first. A token whose logits are all NaN
    gets NaN for weights.

    Args:
        logits: the router's logits, which the op converts to float32.
        bias: added to the scores for the choice of experts, but not to the weights (DeepSeek-V3's
            `e_score_correction_bias`).
        implementation: None, "mosaic_gpu", "mosaic_gpu_interpret" or "xla". The kernel supports
            multiples of 32 experts, at most 1024. The gradient supports only reverse mode.

    Raises:
        TypeError, ValueError: an argument is not an array, or has a wrong shape.
        Refusal: the requested implementation does not support the call; the message says why.
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
            del bias  # chooses, and is in no weight
            return weights_of_chosen(logits, ids, router)

        return with_gradient_of_weights(weights_of, kernel)(logits, bias)

    with jax.named_scope(op):
        return dispatch_kernel(op, implementation, mosaic, lambda: reference(logits, bias))


def route_serves(experts: int) -> bool:
    """Whether the kernel has so many experts."""
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
    """The weights of experts that are chosen already. Its gradient has no choice in it."""
    return _weights(_scores(logits, router), ids, router)


def with_gradient_of_weights(
    weights_of: Callable[..., Array], choose: Callable[..., tuple[Array, Array]]
) -> Callable[..., Any]:
    """`choose(*operands)` gives ids and weights, and is differentiated, in reverse mode only, as
    `weights_of(ids, *operands)`: the backward pass does not choose again."""
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
    """-inf for experts of other groups than the best `top_groups`."""
    grouped = choice.reshape(*choice.shape[:-1], router.groups, -1)
    best, _ = lax.top_k(grouped, router.best_of_group)
    _, kept = lax.top_k(best.sum(-1), router.top_groups)
    mask = jax.nn.one_hot(kept, router.groups, dtype=jnp.bool_).any(-2)
    return jnp.where(mask[..., None], grouped, -jnp.inf).reshape(choice.shape)
