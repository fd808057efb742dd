"""The start of the experts in a decode loop over layers: routing and the shared experts' h.

    ids, weights, listed, arena = router_shared_experts(x, router, bias, gate_up, config, ...)
    y, arena = mixture_of_experts(x, ids, weights, gate_up, down, arena=arena, listed=listed, ...)

One kernel launch replaces the router's product, the choice, and the shared experts' gate and up
(kernels/moe/router_shared_experts.py).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxattn.arena import Arena
from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.layer_index import LayerIndex, split_layer_index
from jaxattn.kernels.moe.router_shared_experts import (
    refusal,
    router_shared_experts_mosaic,
    supports_norm,
)
from jaxattn.kernels.moe.routing.router import RoutedToken
from jaxattn.ops.linear.norm_linear import PendingNorm, tokens_of
from jaxattn.ops.moe.router_logits import router_products
from jaxattn.ops.moe.routing import Router, choose_experts


def supports_fused_router(
    x: Array, router: Array, gate_up: Array, config: Router, always: int
) -> bool:
    """Returns whether the kernel supports these shapes and dtypes."""
    return refusal(x, router, gate_up, config.experts, config.top_k, always) is None


@jax.named_scope("open_experts")
def router_shared_experts(
    x: Float[Array, "1 F"] | PendingNorm,
    router: Float[Array, "L F 2E"],
    bias: Float[Array, "L E"] | None,
    gate_up: Float[Array, "L X J F"],
    config: Router,
    *,
    layer: LayerIndex,
    always: int,
    valid: Int[Array, "1"] | Bool[Array, "1"] | None,
    arena: Arena,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "1 K"], Float[Array, "1 K"], RoutedToken | None, Arena]:
    """Returns (ids, weights, the work list, the arena) for `mixture_of_experts`.

    Args:
        x: One token, which is rounded to the router's dtype. If x is a `PendingNorm` [*T, F], the
            kernel also computes the norm if it supports the size.
        router: `split_router` of all layers, without gates.
        bias: The biases of all layers, as for `route`.
        gate_up: The weights of all layers, [L, E + always, 2 I, F], as for `mixture_of_experts`.
        config: The routing rule.
        layer: Index of the layer.
        always: Number of experts from E on that every token uses, with weight 1.
        valid: False or 0 marks padding, whose ids become -1.
        arena: Scratch memory of at least `jaxattn.moe.scratch(tokens=1, ...)`.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            "xla" returns no work list and leaves the shared experts to `mixture_of_experts`. The op
            has no gradient.

    Raises:
        Refusal: The requested implementation does not support this call; the message says why.
    """
    first, affine, _ = split_layer_index(layer)
    valid = None if valid is None else valid.astype(jnp.int32)

    def mosaic(interpret: bool) -> tuple[Array, Array, RoutedToken | None, Arena]:
        before = (
            x.before(layer) if isinstance(x, PendingNorm) and supports_norm(x.shape[-1]) else None
        )
        token, norm = before or (tokens_of(x).reshape(1, x.shape[-1]), None)
        ids, weights, listed, after, total = router_shared_experts_mosaic(
            token, router, bias, gate_up, experts=config.experts, choice=config.choice,
            always=always, layer=first, affine=affine, valid=valid, arena=arena, norm=norm,
            interpret=interpret,
        )  # fmt: skip
        if isinstance(x, PendingNorm) and total is not None:
            x.set_normed(total, listed.rows[:1])
        return ids, weights, listed, after

    def xla() -> tuple[Array, Array, RoutedToken | None, Arena]:
        logits = router_products(tokens_of(x), router, layer, "xla")
        chosen = choose_experts(
            logits, bias, config, layer=None if bias is None else layer, halves=True,
            always=always, valid=valid, implementation="xla",
        )  # fmt: skip
        return *chosen, arena

    return dispatch_kernel("router_shared_experts", implementation, mosaic, xla)
