"""MLA's weight absorption, so that heads attend in the latent instead of to expanded keys."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxattn.core.numerics.matmul import dot
from jaxattn.core.validation.arguments import OpArguments

LEAST_ROWS = 8  # rows that each head's product needs on a GPU


@jax.named_scope("absorb_query")
def absorb_query(
    q_nope: Float[Array, "B S H nope"], w_uk: Float[Array, "H nope R"]
) -> Float[Array, "B S H R"]:
    """Maps queries into the latent's dims: q_nope . (w_uk c) = (q_nope w_uk) . c.

    Returns q_nope's dtype.
    """
    arguments = OpArguments("absorb_query")
    q_nope = arguments.check("q_nope", q_nope, "B S H nope")
    w_uk = arguments.check("w_uk", w_uk, "H nope R")

    def by_head(q_nope: jax.Array, w_uk: jax.Array) -> jax.Array:
        # The product is [H, B, S, R]. For an einsum XLA would compute [H, R, B] and transpose it.
        axes = (((3,), (1,)), ((2,), (0,)))
        out = lax.dot_general(q_nope, w_uk, axes, preferred_element_type=q_nope.dtype)
        return out.transpose(1, 2, 0, 3)

    return _per_head("bshn,hnr->bshr", q_nope, w_uk, by_head)


@jax.named_scope("absorb_output")
def absorb_output(
    out: Float[Array, "B S H R"], w_uv: Float[Array, "H R Dv"]
) -> Float[Array, "B S H Dv"]:
    """Maps `mla_decode`'s output in the latent's dims to each head's values, in `out`'s dtype."""
    arguments = OpArguments("absorb_output")
    out = arguments.check("out", out, "B S H R")
    w_uv = arguments.check("w_uv", w_uv, "H R Dv")
    spec = "bshr,hrv->bshv"
    by_head = functools.partial(jnp.einsum, spec, preferred_element_type=out.dtype)
    return _per_head(spec, out, w_uv, by_head)


def _per_head(
    spec: str, x: jax.Array, weight: jax.Array, by_head: Callable[..., jax.Array]
) -> jax.Array:
    """Computes a product per head, summed in float32 and rounded to x's dtype by the product.

    A separate rounding step would cost XLA on a GPU another pass over twice the bytes.
    """

    def rounded(x: jax.Array, weight: jax.Array) -> jax.Array:
        return dot(spec, x, weight).astype(x.dtype)

    def of_few(x: jax.Array, weight: jax.Array) -> jax.Array:
        # For one or two rows XLA emits sums of products instead, and transposes the weights of all
        # layers in each step: 60 us for DeepSeek-V2-Lite (H200).
        few = max(-(-LEAST_ROWS // x.shape[1]) - x.shape[0], 0) if x.size else 0
        if not few:
            return by_head(x, weight)
        padded = jnp.pad(x, ((0, few), (0, 0), (0, 0), (0, 0)))
        return by_head(padded, weight)[: x.shape[0]]

    if x.dtype not in (jnp.bfloat16, jnp.float16) or weight.dtype != x.dtype:
        return rounded(x, weight)
    return lax.platform_dependent(x, weight, cpu=rounded, default=of_few)
