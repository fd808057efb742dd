"""The base of attention modules over pages: checks of a call, and the rotation of a step."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxattn.core.cache.prompt_packing import PromptLines
from jaxattn.core.numerics.rope import RopeConfig, Rotation, rotation
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import keep_concrete
from jaxattn.nn.attention.table_overflow import beyond_table
from jaxattn.ops.attention.segments import SegmentBounds


class PagedAttention(nnx.Module):
    """Attention with RoPE whose tokens' keys and values lie in pages.

    Attributes:
        reads: the projection of the hidden numbers into what is cached, and its shape, in words.
        dtype: of the operands of every matrix product.
    """

    reads: ClassVar[tuple[str, str]]
    dtype: jnp.dtype
    rope: RopeConfig

    def __call__(
        self,
        x: Float[Array, "B T hidden"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        cu_seqlens: Int[Array, " n+1"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T hidden"]:
        """Causal attention over whole sequences. Returns float32.

        Args:
            segment_ids: the sequence that each token is of, where rows hold several. The ids must
                not decrease along a row. Tokens see those of their own sequence alone, and its
                positions start at 0. Ids of 0 or below at the end of a row that begins with a
                higher one are of padding. A NaN or an infinity makes the outputs NaN of its token
                and of those behind it in its sequence, and of no others.
            cu_seqlens: offsets of n sequences packed in one row (B = 1) instead, starting at 0.
                Tokens from the last one on are padding.
            positions: of the tokens, for the rotation, if they are not those in their sequences:
                of pieces of longer ones. What a token sees does not depend on them.

        Raises:
            TypeError, ValueError: an argument's dtype, shape or (where concrete) value does not
                fit; it is named.
        """
        return self._whole(x, segment_ids, cu_seqlens, positions)

    def _whole(
        self, x: Any, segment_ids: Any, cu_seqlens: Any, positions: Any, **more: Any
    ) -> Float[Array, "B T hidden"]:
        """`__call__`; `more` is what `_attend_whole` of a subclass reads too."""
        x, spoiled, positions, bounds = self._isolated(x, segment_ids, cu_seqlens, positions)
        packed = {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
        y = self._attend_whole(x, positions, bounds, packed, **more)
        return y if spoiled is None else jnp.where(spoiled[..., None], jnp.nan, y)

    def _isolated(
        self, x: Any, segment_ids: Any, cu_seqlens: Any, positions: Any
    ) -> tuple[Array, Bool[Array, "B T"] | None, Int[Array, "B T"], SegmentBounds]:
        """(x without what would reach other sequences, the tokens whose outputs are NaN for it, all
        positions, where sequences begin and end), after the checks of `__call__`."""
        arguments = self._check_tokens(type(self).__name__, x, "B T hidden")
        bounds = SegmentBounds.checked(arguments, x, None, segment_ids, cu_seqlens)
        if positions is not None:
            positions = arguments.integers("positions", positions, "B T")[1]
        else:
            first = 0 if bounds.first is None else bounds.first
            positions = jnp.broadcast_to(jnp.arange(x.shape[1]) - first, x.shape[:2])
        return *bounds.isolated(x, self.dtype), positions, bounds

    def _attend_whole(
        self, x: Array, positions: Array, bounds: SegmentBounds, packed: dict[str, Any]
    ) -> Float[Array, "B T hidden"]:
        """`__call__` of checked arguments; `packed` are keywords of the op, which finds `bounds` in
        them."""
        raise NotImplementedError

    def decode_rotation(
        self, seq_lens: Int[Array, "B"], q_len: int, query_lens: Int[Array, "B"] | int | None = None
    ) -> Rotation:
        """The angles of each row's last `q_len` tokens, or the first `query_lens` of them; the
        layers of a model share them."""
        op = f"{type(self).__name__}.decode_rotation"
        return rotation(self.decode_positions(op, seq_lens, q_len, query_lens), self.rope)

    def decode_positions(
        self, op: str, seq_lens: Any, q_len: int, query_lens: Any
    ) -> Int[Array, "B S"]:
        """The positions of the tokens of `decode_rotation`; 0 for those of padding rows."""
        arguments = OpArguments(op)
        seq_lens = arguments.integers("seq_lens", seq_lens, "B")[1]
        if not isinstance(query_lens, int | None) and getattr(query_lens, "shape", None) != ():
            query_lens = arguments.integers("query_lens", query_lens, "B")[1]
        first = (seq_lens - (q_len if query_lens is None else query_lens))[:, None]
        return jnp.maximum(first + jnp.arange(q_len), 0)

    def _most(self, kv_cache: Array, block_tables: Any) -> int:
        """Tokens that a row's block table has places for."""
        raise NotImplementedError

    def _marked(
        self,
        y: Float[Array, "1 N hidden"],
        lines: PromptLines,
        kv_cache: Array,
        block_tables: Any,
        rows: Mapping[str, Any] | None,
    ) -> Float[Array, "1 N hidden"]:
        """The output of a mixed step; NaN for the tokens of rows beyond their tables.

        Args:
            block_tables: of the lines.
            rows: the keywords of `decode`, of the rows behind them.
        """
        most = self._most(kv_cache, block_tables)
        beyond = beyond_table(lines.tokens, lines.seq_lens, most, lines.query_lens)
        if beyond is None:  # the rows' lengths are known too, or looked after
            return y
        others = None
        if rows is not None:
            most = self._most(kv_cache, rows["block_tables"])
            others = beyond_table(1, rows["seq_lens"], most, None)
            if others is None:
                others = jnp.zeros((y.shape[1] - beyond.size, 1), bool)
        return jnp.where(lines.join(beyond, others)[..., None], jnp.nan, y)

    def _check_tokens(self, op: str, x: Any, axes: str) -> OpArguments:
        """The checks of a call's further arguments, after that of `x`."""
        name, shape = self.reads
        hidden = getattr(self, name).in_features
        arguments = OpArguments(op, {"hidden": (hidden, f"{name} {shape}")})
        arguments.check_shape("x", x, axes)
        return arguments

    def _as_given(
        self,
        arguments: OpArguments,
        x: Any,
        block_tables: Any,
        seq_lens: Any,
        query_lens: Any,
        *,
        optional: bool = False,
    ) -> tuple[Any, Any, Any]:
        """Tables and lengths as they were given, after the check of `query_lens`, which may be None
        where they are `optional`. The ops in a module check what is known again, and that of
        `jax.numpy` arrays is not, under jit."""
        if query_lens is not None or not optional:
            arguments.check_query_lens(query_lens, "x", x)
            query_lens = keep_concrete(query_lens)
        return keep_concrete(block_tables), keep_concrete(seq_lens), query_lens
