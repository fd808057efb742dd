"""A router's logits: float32 weights times bfloat16 tokens, by products of bfloat16.

A float32 weight is nearly the sum of two bfloat16 numbers, its rounding and what the rounding left:
within 2**-17 of it, and exactly where the checkpoint has the router in bfloat16. Float32 products
are slow on a GPU: 69 us per layer of DeepSeek-V2-Lite at 32 tokens (H200), where these take 4.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxattn.core.dispatch import Implementation
from jaxattn.core.layers import LayerOf
from jaxattn.core.rounding import rounded
from jaxattn.ops.linear import kernel_serves, linear_layer

# The kernel of the product wants columns by 64, and two halves are side by side.
HALF = 32


def split_router(
    router: Float[Array, "*L F E"], gates: Float[Array, "*L F 1"] | None = None
) -> Float[Array, "*L F 2N"]:
    """Float32 weights as two of bfloat16, side by side: as many bytes.

    Args:
        gates: a column more, of the shared experts' gate. With it N is E + 1 and zeros behind it,
            up to a multiple of 32.
    """
    if gates is not None:
        none = [(0, 0)] * (gates.ndim - 1)
        router = jnp.concatenate([router, gates], axis=-1)
        router = jnp.pad(router, (*none, (0, -router.shape[-1] % HALF)))
    high = rounded(router, jnp.bfloat16)
    low = (router - high.astype(jnp.float32)).astype(jnp.bfloat16)
    return jnp.concatenate([high, low], axis=-1)


@jax.named_scope("router_logits")
def router_logits(
    x: Float[Array, "*T F"],
    routers: Float[Array, "L F E"],
    layer: LayerOf,
    implementation: Implementation | None = None,
    *,
    gates: Float[Array, "L F 1"] | None = None,
) -> Float[Array, "T N"]:
    """Float32 logits of a layer's router, [T, E].

    Args:
        x: tokens; they are rounded to bfloat16.
        routers: of all layers, float32, or what `split_router` makes of them.
        implementation: of the product, where the kernel has its shape.
        gates: of all layers, where `routers` are float32; then, or where `split_router` had gates,
            the columns are its N, and number E is the gate's product.
    """
    halves = routers if routers.dtype == jnp.bfloat16 else split_router(routers, gates)
    tokens = x.reshape(-1, x.shape[-1])
    if not kernel_serves(tokens, [halves]):
        implementation = "xla"
    (both,) = linear_layer(tokens, (halves,), layer=layer, implementation=implementation)
    high, low = jnp.split(both, 2, axis=-1)
    return high + low
