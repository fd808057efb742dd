"""A router's products with tokens: the logits of the experts.

Float32 weights times bfloat16 tokens are computed as products of bfloat16. A float32 weight is
nearly the sum of two bfloat16 numbers, its rounding and the rest: within 2**-17 of it, and exactly
if the checkpoint's router is bfloat16. Float32 products are slow on a GPU: 69 us per layer of
DeepSeek-V2-Lite at 32 tokens (H200), compared with 4 us here.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn.core.dispatch import Implementation
from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.numerics.rounding_barrier import rounded
from jaxattn.core.reverse_mode import in_reverse_mode_only
from jaxattn.kernels.linear.cta import ROWS
from jaxattn.ops.linear.linear import kernel_serves, linear_layer

# The product's kernel needs a multiple of 64 columns, and two halves are side by side.
HALF = 32


def split_router(
    router: Float[Array, "*L F E"], gates: Float[Array, "*L F 1"] | None = None
) -> Float[Array, "*L F 2N"]:
    """Splits float32 weights into two bfloat16 halves, side by side, of the same total bytes.

    Args:
        gates: An additional column for the shared experts' gate. N is then E + 1, zero-padded to a
            multiple of 32. The result has at least 64 columns: with fewer, a separate XLA launch
            would have to slice the kernel's product.
    """
    if gates is not None:
        router = jnp.concatenate([router, gates], axis=-1)
        router = jnp.pad(router, _behind(router, -router.shape[-1] % HALF))
    router = jnp.pad(router, _behind(router, max(0, ROWS // 2 - router.shape[-1])))
    high = rounded(router, jnp.bfloat16)
    low = (router - high.astype(jnp.float32)).astype(jnp.bfloat16)
    return jnp.concatenate([high, low], axis=-1)


def split_biases(biases: Float[Array, "*L E"], columns: int) -> Float[Array, "*L 2N"]:
    """Pads biases to two halves, of which the first holds the biases.

    The result has at least 128 numbers, because the kernel of the products reads that many.
    """
    return jnp.pad(biases, _behind(biases, max(0, max(columns, ROWS) - biases.shape[-1])))


def _behind(x: Array, count: int) -> list[tuple[int, int]]:
    """Returns the pad widths that append `count` columns."""
    return [(0, 0)] * (x.ndim - 1) + [(0, count)]


@jax.named_scope("router_logits")
def router_products(
    x: Float[Array, "*T F"],
    routers: Float[Array, "L F E"],
    layer: LayerIndex,
    implementation: Implementation | None = None,
    *,
    gates: Float[Array, "L F 1"] | None = None,
    biases: Float[Array, "L E"] | None = None,
) -> Float[Array, "T 2N"]:
    """Returns a layer's router products as two halves side by side, which add up to the logits.

    Args:
        x: Tokens, which are rounded to bfloat16.
        routers: The routers of all layers, in float32 or as `split_router` returns them.
        implementation: Implementation of the product, if the kernel supports its shape.
        gates: The shared experts' gates of all layers, if `routers` are float32. With them, or if
            `split_router` was given gates, column E of each half is the gate's product.
        biases: The biases of all layers, or the result of `split_biases`.
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
    """Computes `x @ router` in float32 to within about 2**-16, by three products of bfloat16.

    Differentiable in reverse mode only. Gradients are products of bfloat16 too, as in every other
    linear of a bfloat16 layer, because no choice depends on them.
    """
    halves = split_router(_in_halves(router))
    # The experts use the same rounded tokens, so XLA computes one array for both.
    high = x.astype(jnp.bfloat16)
    low = (x - lax.reduce_precision(x, 8, 7)).astype(jnp.bfloat16)
    logits = sum_split_logits(_product(high, halves, (1, 0)))
    logits += _product(low, halves[:, : logits.shape[1]], (1, 0))
    return logits[:, : router.shape[1]]


def _training_logits_fwd(x: Array, router: Array) -> tuple[Array, tuple[Array, Array]]:
    kept = x.astype(jnp.bfloat16), router.astype(jnp.bfloat16)
    return _training_logits(x, router), kept


def _training_logits_bwd(residuals: tuple[Array, Array], of_logits: Array) -> tuple[Array, Array]:
    x, router = residuals
    count = router.shape[1]
    of_logits, router = (_in_halves(each) for each in (of_logits.astype(jnp.bfloat16), router))
    of_x = _product(of_logits, router, (1, 1), x.dtype).astype(jnp.float32)
    return of_x, _product(x, of_logits, (0, 0))[:, :count]


_training_logits.defvjp(_training_logits_fwd, _training_logits_bwd)
training_logits = in_reverse_mode_only("MixtureOfExperts", _training_logits)


def _in_halves(x: Float[Array, "T N"]) -> Float[Array, "T M"]:
    """Appends columns of zeros up to a multiple of 32, as tensor cores need."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % HALF)))


def _product(
    a: Array, b: Array, contract: tuple[int, int], dtype: DTypeLike = jnp.float32
) -> Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=dtype)


def sum_split_logits(products: Float[Array, "T 2N"]) -> Float[Array, "T N"]:
    """Returns the logits from the result of `router_products`."""
    high, low = jnp.split(products, 2, axis=-1)
    return high + low
