"""The beginning of a token's experts in a loop over layers: its choice, and the shared experts' h.

    ids, weights, listed, arena = router_shared_experts(x, router, bias, gate_up, config, ...)
    y, arena = mixture_of_experts(x, ids, weights, gate_up, down, arena=arena, listed=listed, ...)

The kernel does in one launch what the router's product, the choice and the shared experts' gate and
up do one after another (kernels/moe/router_shared_experts.py).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxattn.arena import Arena
from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.stacked_layer import StackedLayer, split_layer_index
from jaxattn.kernels.moe.router_shared_experts import (
    refusal,
    router_shared_experts_mosaic,
    supports_norm,
)
from jaxattn.kernels.moe.routing.router import RoutedToken
from jaxattn.ops.linear.norm_linear import PendingNorm, tokens_of
from jaxattn.ops.moe.router_logits import choose_experts, router_products
from jaxattn.ops.moe.routing import Router


def supports_fused_router(
    x: Array, router: Array, gate_up: Array, config: Router, always: int
) -> bool:
    """Whether shapes and dtypes are the kernel's."""
    return refusal(x, router, gate_up, config.experts, config.top_k, always) is None


@jax.named_scope("open_experts")
def router_shared_experts(
    x: Float[Array, "1 F"] | PendingNorm,
    router: Float[Array, "L F 2E"],
    bias: Float[Array, "L E"] | None,
    gate_up: Float[Array, "L X J F"],
    config: Router,
    *,
    layer: StackedLayer,
    always: int,
    valid: Int[Array, "1"] | Bool[Array, "1"] | None,
    arena: Arena,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "1 K"], Float[Array, "1 K"], RoutedToken | None, Arena]:
    """(ids, weights, the list of work, the arena) for `mixture_of_experts`.

    Args:
        x: a token; it is rounded to the router's dtype. If x is a `PendingNorm` [*T, F], the
            kernel makes the norm too, where it can.
        router: of all layers, what `split_router` makes of it, without a gate.
        bias: of all layers, as `route` has it.
        gate_up: of all layers, [L, E + always, 2 I, F] as `mixture_of_experts` has it.
        config: how tokens choose.
        layer: the layer's number.
        always: the experts from E on that every token takes, with weight 1.
        valid: false or 0 for padding, whose ids are -1.
        arena: scratch of at least `jaxattn.moe.scratch(tokens=1, ...)`.
        implementation: None, "mosaic_gpu", "mosaic_gpu_interpret" or "xla", which makes no list and
            leaves the shared experts to `mixture_of_experts`. Neither has a gradient.

    Raises:
        Refusal: the named implementation refuses, and says why.
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
