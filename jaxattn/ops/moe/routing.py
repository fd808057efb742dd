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
from jaxtyping import Array, Bool, Float, Int

from jaxattn.core.dispatch import Implementation, dispatch_kernel, without_gradient
from jaxattn.core.layer_index import LayerIndex, split_layer_index
from jaxattn.core.reverse_mode import in_reverse_mode_only
from jaxattn.core.validation.array_checks import check_array, check_sizes, finite
from jaxattn.kernels.moe.routing.router import LEAST, MOST_EXPERTS, RoutedToken, route_mosaic
from jaxattn.kernels.moe.routing.small_batch_alignment import copies, supports_pairs
from jaxattn.ops.moe.router_logits import sum_split_logits


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

    def backward(residuals: Any, cotangents: Any) -> Any:
        ids, operands = residuals
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


def choose_experts(
    logits: Float[Array, "T N"],
    bias: Float[Array, "*L E"] | None,
    router: Router,
    *,
    layer: LayerIndex | None = None,
    halves: bool = False,
    always: int = 0,
    gated: bool = False,
    valid: Int[Array, "T"] | Bool[Array, "T"] | None = None,
    x: Float[Array, "T F"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "T K"], Float[Array, "T K"], RoutedToken | None]:
    """Returns each token's experts and their weights: `route`'s, then those every token uses.

    Args:
        logits: The logits of the E experts in the first columns, or with `halves` the result of
            `router_products`.
        bias: As for `route`, or the biases of all layers, which `layer` indexes.
        always: Number of experts from E on that every token uses, with weight 1.
        gated: Whether these experts' weight is the sigmoid of column E instead of 1.
        valid: False or 0 marks a token as padding, whose ids become -1.
        x: The token that `mixture_of_experts` will receive, if T is 1. If the kernel supports these
            sizes, it also returns the `listed` argument of that op. With x the op has no gradient.
        implementation: As for `route`.

    Raises:
        Refusal: The requested implementation does not support this call; the message says why.
    """
    count = router.experts
    valid = None if valid is None else valid.astype(jnp.int32)
    first, affine, _ = (None, (1, 0), None) if layer is None else split_layer_index(layer)

    def reference(
        logits: Array, bias: Array | None, first: Array | None, valid: Array | None
    ) -> tuple[Array, Array]:
        columns = sum_split_logits(logits) if halves else logits
        own = bias if bias is None or first is None else bias[affine[0] * first + affine[1]]
        ids, weights = route(columns[:, :count], own, router, implementation="xla")
        last = jnp.arange(count, count + always, dtype=ids.dtype)
        ids = jnp.concatenate([ids, jnp.broadcast_to(last, (len(ids), always))], axis=1)
        weights = with_shared(weights, columns)
        return (ids if valid is None else jnp.where(valid[:, None] != 0, ids, -1)), weights

    def with_shared(weights: Array, columns: Array) -> Array:
        opened = jax.nn.sigmoid(columns[:, count : count + 1]) if gated else jnp.float32(1)
        opened = jnp.broadcast_to(opened, (len(weights), always))
        return jnp.concatenate([weights, opened], axis=1)

    def weights_of(
        ids: Array, logits: Array, bias: Array | None, first: Array | None, valid: Array | None
    ) -> Array:
        del bias, first, valid
        columns, routed = sum_split_logits(logits) if halves else logits, ids[:, : router.top_k]
        weights = weights_of_chosen(columns[:, :count], jnp.maximum(routed, 0), router)
        # Padding has lost its ids here, and nothing reads its weights.
        return jnp.where(routed[:, :1] >= 0, with_shared(weights, columns), 0)

    def mosaic(interpret: bool) -> tuple[Array, Array, RoutedToken | None]:
        options: dict[str, Any] = {
            **router.choice, "experts": count, "halves": halves, "always": always, "gated": gated,
            "affine": affine, "interpret": interpret,
        }  # fmt: skip
        if x is not None and supports_pairs(1, router.top_k + always) and copies(x.shape[1]):
            operands = without_gradient("route", (logits, bias, x), "logits bias x")
            return route_mosaic(*operands[:2], layer=first, valid=valid, x=operands[2], **options)

        def kernel(
            logits: Array, bias: Array | None, first: Array | None, valid: Array | None
        ) -> tuple[Array, Array]:
            return route_mosaic(logits, bias, layer=first, valid=valid, **options)[:2]

        return *with_gradient_of_weights(weights_of, kernel)(logits, bias, first, valid), None

    return dispatch_kernel(
        "route", implementation, mosaic, lambda: (*reference(logits, bias, first, valid), None)
    )
