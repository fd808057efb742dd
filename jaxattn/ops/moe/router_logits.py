"""A router: its products with tokens, and the experts that follow from them.

Float32 weights times bfloat16 tokens are products of bfloat16.

A float32 weight is nearly the sum of two bfloat16 numbers, its rounding and what the rounding left:
within 2**-17 of it, and exactly where the checkpoint has the router in bfloat16. Float32 products
are slow on a GPU: 69 us per layer of DeepSeek-V2-Lite at 32 tokens (H200), where these take 4.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxattn.core.dispatch import Implementation, dispatch_kernel, without_gradient
from jaxattn.core.numerics.rounding_barrier import rounded
from jaxattn.core.reverse_mode import in_reverse_mode_only
from jaxattn.core.stacked_layer import StackedLayer, split_layer_index
from jaxattn.kernels.linear.cta import ROWS
from jaxattn.kernels.moe.routing.router import RoutedToken, route_mosaic
from jaxattn.kernels.moe.routing.small_batch_alignment import copies, supports_pairs
from jaxattn.ops.linear.linear import kernel_serves, linear_layer
from jaxattn.ops.moe.routing import (
    Router,
    route,
    weights_of_chosen,
    with_gradient_of_weights,
)

# The kernel of the product wants columns by 64, and two halves are side by side.
HALF = 32


def split_router(
    router: Float[Array, "*L F E"], gates: Float[Array, "*L F 1"] | None = None
) -> Float[Array, "*L F 2N"]:
    """Float32 weights as two of bfloat16, side by side: as many bytes.

    Args:
        gates: a column more, of the shared experts' gate. With it N is E + 1 and zeros behind it,
            up to a multiple of 32. There are 64 columns at least: of fewer the kernel's product
            has to be cut, by a launch of XLA's.
    """
    if gates is not None:
        router = jnp.concatenate([router, gates], axis=-1)
        router = jnp.pad(router, _behind(router, -router.shape[-1] % HALF))
    router = jnp.pad(router, _behind(router, max(0, ROWS // 2 - router.shape[-1])))
    high = rounded(router, jnp.bfloat16)
    low = (router - high.astype(jnp.float32)).astype(jnp.bfloat16)
    return jnp.concatenate([high, low], axis=-1)


def split_biases(biases: Float[Array, "*L E"], columns: int) -> Float[Array, "*L 2N"]:
    """Of two halves the first has the biases; there are 128 numbers at least, as the kernel of the
    products reads so many."""
    return jnp.pad(biases, _behind(biases, max(0, max(columns, ROWS) - biases.shape[-1])))


def _behind(x: Array, count: int) -> list[tuple[int, int]]:
    """Widths of a pad by so many columns."""
    return [(0, 0)] * (x.ndim - 1) + [(0, count)]


@jax.named_scope("router_logits")
def router_products(
    x: Float[Array, "*T F"],
    routers: Float[Array, "L F E"],
    layer: StackedLayer,
    implementation: Implementation | None = None,
    *,
    gates: Float[Array, "L F 1"] | None = None,
    biases: Float[Array, "L E"] | None = None,
) -> Float[Array, "T 2N"]:
    """Float32 logits of a layer's router in two halves side by side, whose sum they are.

    Args:
        x: tokens; they are rounded to bfloat16.
        routers: of all layers, float32, or what `split_router` makes of them.
        implementation: of the product, where the kernel has its shape.
        gates: of all layers, where `routers` are float32; then, or where `split_router` had gates,
            column E of a half is the gate's product.
        biases: of all layers, or what `split_biases` makes of them.
    """
    halves = routers if routers.dtype == jnp.bfloat16 else split_router(routers, gates)
    tokens = x.reshape(-1, x.shape[-1])
    if not kernel_serves(tokens, [halves]):
        implementation = "xla"
    added = None if biases is None else [split_biases(biases, halves.shape[-1])]
    (both,) = linear_layer(
        tokens, (halves,), layer=layer, biases=added, implementation=implementation
    )
    return both


@jax.custom_vjp
def _training_logits(x: Float[Array, "T F"], router: Float[Array, "F E"]) -> Float[Array, "T E"]:
    """`x @ router` of float32 within about 2**-16, by three products of bfloat16.

    Differentiable in reverse mode only. Gradients are products of bfloat16 as well, as those of
    every other linear of a bfloat16 layer: nothing is chosen by them.
    """
    halves = split_router(_in_halves(router))
    # The experts take the same rounded tokens: XLA makes one array of both.
    high = x.astype(jnp.bfloat16)
    low = (x - lax.reduce_precision(x, 8, 7)).astype(jnp.bfloat16)
    logits = sum_split_logits(_product(high, halves, (1, 0)))
    logits += _product(low, halves[:, : logits.shape[1]], (1, 0))
    return logits[:, : router.shape[1]]


def _training_logits_fwd(x: Array, router: Array) -> tuple[Array, tuple[Array, Array]]:
    kept = x.astype(jnp.bfloat16), router.astype(jnp.bfloat16)
    return _training_logits(x, router), kept


def _training_logits_bwd(kept: tuple[Array, Array], of_logits: Array) -> tuple[Array, Array]:
    x, router = kept
    count = router.shape[1]
    of_logits, router = (_in_halves(each) for each in (of_logits.astype(jnp.bfloat16), router))
    of_x = _product(of_logits, router, (1, 1), x.dtype).astype(jnp.float32)
    return of_x, _product(x, of_logits, (0, 0))[:, :count]


_training_logits.defvjp(_training_logits_fwd, _training_logits_bwd)
training_logits = in_reverse_mode_only("MixtureOfExperts", _training_logits)


def _in_halves(x: Float[Array, "T N"]) -> Float[Array, "T M"]:
    """With columns of zeros up to a multiple of 32, which tensor cores take."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % HALF)))


def _product(
    a: Array, b: Array, contract: tuple[int, int], dtype: DTypeLike = jnp.float32
) -> Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=dtype)


def sum_split_logits(products: Float[Array, "T 2N"]) -> Float[Array, "T N"]:
    """The logits of `router_products`."""
    high, low = jnp.split(products, 2, axis=-1)
    return high + low


def choose_experts(
    logits: Float[Array, "T N"],
    bias: Float[Array, "*L E"] | None,
    router: Router,
    *,
    layer: StackedLayer | None = None,
    halves: bool = False,
    always: int = 0,
    gated: bool = False,
    valid: Int[Array, "T"] | Bool[Array, "T"] | None = None,
    x: Float[Array, "T F"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "T K"], Float[Array, "T K"], RoutedToken | None]:
    """The experts of each token and their weights, `route`'s and those that every token takes.

    Args:
        logits: of the E experts, in the first columns; or with `halves`, `router_products`.
        bias: as of `route`, or of all layers, of which `layer` says one.
        always: the experts from E on that every token takes, with weight 1.
        gated: or with the sigmoid of column E.
        valid: false or 0 for a token that is padding: its ids are -1.
        x: the token, where T is 1, as `mixture_of_experts` will be given it. The kernel makes its
            `listed` of it, where it has such sizes. With x it has no gradient.
        implementation: as of `route`.

    Raises:
        Refusal: the named implementation refuses, and says why.
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
        # The experts of padding are not known any more, and nobody reads their weights.
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
