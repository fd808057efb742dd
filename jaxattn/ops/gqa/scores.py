"""Scores of grouped-query attention: visible keys, masking, softmax and output.

Inside, rows are [B, Hk, Q * g] for Q tokens of g = H / Hk query heads each, row s * g + j of a
key-value head: the g query heads that read it, token by token.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxattn.core.numerics.matmul import dot
from jaxattn.core.numerics.online_softmax import OnlineSoftmax
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import LEAST_FLOAT32, check_window, finite
from jaxattn.kernels.gqa.decode.arguments import GqaDecodeCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionScoring:
    """The scoring of keys by a query, and the keys that the query sees.

    Attributes:
        scale: Factor of the scores.
        window: Number of keys that a query sees, its own token's included. None means all before
            it.
        soft_cap: The c of c * tanh(score / c). None leaves the scores unchanged.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None

    @classmethod
    def checked(
        cls, arguments: OpArguments, head_dim: int, scale: Any, window: Any, soft_cap: Any
    ) -> "AttentionScoring":
        """Returns the scoring of an op's arguments after checking them; errors name the op."""
        op = arguments.op
        scale = head_dim**-0.5 if scale is None else arguments.check_scale(scale)
        window = check_window(op, window)
        if soft_cap is not None:
            soft_cap = finite(op, "soft_cap", soft_cap)
            if soft_cap < LEAST_FLOAT32:
                raise ValueError(
                    f"{op}: soft_cap must be positive, got {soft_cap}; use None for no cap, or at "
                    "least 1.2e-38, the smallest positive float32 number"
                )
        return cls(scale=scale, window=window, soft_cap=soft_cap)

    @classmethod
    def of_call(cls, call: GqaDecodeCall) -> "AttentionScoring":
        return cls(scale=call.scale, window=call.window, soft_cap=call.soft_cap)

    def of(self, queries: Float[Array, "B Hk R D"], keys: Float[Array, "B K Hk D"]) -> Array:
        """Returns the scores, float32 [B, Hk, R, K] (float64 for float64)."""
        scores = dot("bhrd,bkhd->bhrk", queries, keys) * self.scale
        return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def visible(self, query: Int[Array, "*q"], key: Int[Array, "*k"]) -> Bool[Array, "*qk"]:
        """Returns whether the token at position `query` sees the one at `key`; both broadcast."""
        seen = key <= query
        return seen if self.window is None else seen & (key > query - self.window)

    def first_visible(self, query: Int[Array, "*q"]) -> Int[Array, "*q"]:
        """Returns the first position that the token at `query` sees."""
        if self.window is None:
            return jnp.zeros_like(query)
        return jnp.maximum(query - (self.window - 1), 0)


def check_heads(
    arguments: OpArguments, q: Any, kv_heads: int, source: str, shape: tuple[int, ...]
) -> None:
    """Raises unless every key-value head has equally many query heads."""
    if q.shape[-2] % kv_heads:
        raise ValueError(
            f"{arguments.op}: H must be a multiple of Hk, got H = {q.shape[-2]} of q {q.shape} and "
            f"Hk = {kv_heads} of {source} {shape}"
        )


def check_sinks(arguments: OpArguments, sinks: Any) -> jax.Array | None:
    return None if sinks is None else arguments.check("sinks", sinks, "H", ("float32",))


def grouped(x: Float[Array, "B Q H D"], kv_heads: int) -> Float[Array, "B Hk R D"]:
    """Groups queries into the rows of each key-value head."""
    batch, tokens, heads, dim = x.shape
    x = x.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    return x.swapaxes(1, 2).reshape(batch, kv_heads, -1, dim)


def ungrouped(x: Float[Array, "B Hk R *D"], tokens: int) -> Float[Array, "B Q H *D"]:
    """Inverts `grouped`, for outputs or for one number per row."""
    batch, kv_heads, rows, *dim = x.shape
    x = x.reshape(batch, kv_heads, tokens, rows // tokens, *dim)
    return x.swapaxes(1, 2).reshape(batch, tokens, -1, *dim)


def weigh(values: Float[Array, "B K Hk D"]) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that sums values weighted by p, rounded to the values' dtype."""
    return lambda p: dot("bhrk,bkhd->bhrd", p.astype(values.dtype), values)


def finish(
    state: OnlineSoftmax,
    sees: Bool[Array, "B Q"],
    sinks: Float[Array, "H"] | None,
    gate: Float[Array, "B Q H D"] | None,
) -> tuple[Float[Array, "B Q H D"], Float[Array, "B Q H"]]:
    """Returns (out, lse) in the wide dtype: adds the sinks once, then applies the gate.

    `out` is 0 and `lse` is -inf where `sees` is False.
    """
    batch, tokens = sees.shape
    kv_heads, rows = state.top.shape[1:]
    rows_see = jnp.repeat(sees, rows // tokens, axis=1)[:, None]
    if sinks is not None:
        logits = sinks.astype(state.top.dtype).reshape(kv_heads, 1, -1)
        logits = jnp.broadcast_to(logits, (kv_heads, tokens, rows // tokens))
        logits = jnp.broadcast_to(logits.reshape(kv_heads, rows, 1), (batch, kv_heads, rows, 1))
        # A key without a value.
        state = state.add(logits, rows_see[..., None], lambda p: jnp.zeros_like(state.acc))
    out, lse = state.finish(jnp.broadcast_to(rows_see, state.top.shape))
    out, lse = ungrouped(out, tokens), ungrouped(lse, tokens)
    if gate is not None:
        # Masked before the sigmoid: the gradient of a NaN at padding would be NaN.
        gate = jnp.where(sees[..., None, None], gate, 0).astype(out.dtype)
        out = out * jax.nn.sigmoid(gate)
    return out, lse


def window_begins(
    scores: AttentionScoring, first_query: Int[Array, "B"], lengths: Int[Array, "B"]
) -> Int[Array, "B"] | None:
    """Returns where each row begins to read its cached tokens, or None if all rows begin at 0."""
    if scores.window is None:
        return None
    return jnp.minimum(scores.first_visible(jnp.maximum(first_query, 0)), lengths)
