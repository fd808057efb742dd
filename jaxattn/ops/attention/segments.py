"""Sequences packed one after another in a row: the first token that each token sees."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jaxattn.core.cache.state_pool import as_offsets, check_cu_seqlens
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import keep_concrete


class SegmentBounds(NamedTuple):
    """The valid tokens of each row and their visibility: token t sees first[t] to t.

    Attributes:
        lengths: Number of valid tokens of each row.
        first: First token that each token sees, non-decreasing along a row. None means token 0.
        all_valid: Whether every row is known to have T valid tokens.
    """

    lengths: Int[Array, "B"]
    first: Int[Array, "B T"] | None
    all_valid: bool

    @classmethod
    def checked(
        cls, arguments: OpArguments, q: jax.Array, lengths: Any, segment_ids: Any, cu_seqlens: Any
    ) -> "SegmentBounds":
        """Returns the bounds of an op's arguments after checking them; errors name the op."""
        op, (batch, tokens) = arguments.op, q.shape[:2]
        reason = f"q {q.shape} has {tokens} tokens per row; give lengths of at most {tokens}"
        limit: Any = np.full(batch, tokens, np.int32)
        valid = jnp.asarray(limit)
        if lengths is not None:
            limit, valid = arguments.lengths("lengths", lengths, tokens, reason)
        if cu_seqlens is None and segment_ids is None:
            return cls(valid, None, lengths is None)
        if cu_seqlens is None:
            known, ids = arguments.integers("segment_ids", segment_ids, "B T")
            _check_sorted(op, known, limit)
            in_sequence = _tokens_of_sequences(ids, valid, jnp)
            # A traced row whose ids are not sorted has no valid tokens.
            ordered = ~jnp.any(_falls(ids, in_sequence), axis=1)
            count = in_sequence.sum(axis=1, dtype=jnp.int32)
            return cls(jnp.where(ordered, count, 0), _first_of_run(ids), False)
        conflict = "lengths" if lengths is not None else "segment_ids"
        if lengths is not None or segment_ids is not None:
            raise ValueError(
                f"{op}: cu_seqlens and {conflict} both define sequences; drop {conflict}"
            )
        cu_seqlens = keep_concrete(cu_seqlens)
        check_cu_seqlens(op, cu_seqlens, batch, tokens)
        ends = as_offsets(cu_seqlens)
        assert ends is not None
        token = jnp.arange(tokens, dtype=jnp.int32)
        sequence = jnp.searchsorted(ends[1:-1], token, side="right", method="compare_all")
        # Traced offsets that decrease, or exceed the row, make all tokens invalid.
        is_valid = (ends[0] == 0) & jnp.all(ends[1:] >= ends[:-1]) & (ends[-1] <= tokens)
        lengths = jnp.where(is_valid, ends[-1:], 0)
        return cls(lengths, jnp.minimum(ends[sequence], token)[None], False)

    def isolated(self, x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array | None]:
        """Masks tokens so that no NaN or infinity reaches another sequence, as 0 * NaN would.

        Args:
            x: [B, T, D].
            dtype: The dtype to which x will be rounded, which may turn a number into an infinity.

        Returns:
            (x with zeros for padding and for non-finite tokens; bool [B, T], whether a token or an
            earlier one of its sequence is non-finite). The second is None without sequences.
        """
        if self.first is None:
            return x, None
        token = jnp.arange(x.shape[1], dtype=jnp.int32)
        rounded = jnp.asarray(x).astype(dtype)
        valid, finite = token < self.lengths[:, None], jnp.isfinite(rounded).all(axis=2)
        latest = jax.lax.cummax(jnp.where(valid & ~finite, token, -1), axis=1)
        x = jnp.where((valid & finite)[..., None], x, 0)
        return x, valid & (latest >= self.first)


def _tokens_of_sequences(ids: Any, lengths: Any, xp: Any) -> Any:
    """Returns which tokens belong to a sequence, bool [B, T], in NumPy or JAX.

    Packed training data ends a row with tokens of id 0 or -1. These tokens are padding if the row's
    first id is greater. In a row that begins with 0, they belong to a sequence.
    """
    token = xp.arange(ids.shape[1], dtype=xp.int32)
    return ((ids > 0) | (ids >= ids[:, :1])) & (token < lengths[:, None])


def _falls(ids: Any, in_sequence: Any) -> Any:
    """Returns whether a sequence's token follows padding or a higher id, bool [B, T - 1]."""
    return in_sequence[:, 1:] & ~(in_sequence[:, :-1] & (ids[:, 1:] >= ids[:, :-1]))


def _check_sorted(op: str, ids: Any, lengths: Any) -> None:
    """Raises if concrete ids [B, T] decrease along a row; does not check traced ones."""
    if isinstance(ids, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    ids, lengths = np.asarray(ids), np.asarray(lengths)
    falls = np.argwhere(_falls(ids, _tokens_of_sequences(ids, lengths, np)))
    if len(falls):
        row, t = falls[0].tolist()
        raise ValueError(
            f"{op}: segment_ids must not decrease along a row, except to padding of id 0 or below "
            f"at its end; row {row} has {ids[row, t]} at token {t} and {ids[row, t + 1]} "
            "after it; sort the row's tokens by segment"
        )


def _first_of_run(ids: jax.Array) -> jax.Array:
    """Returns, for each token, the position of the first in its run of equal ids."""
    position = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(begins, position, 0), axis=1)
