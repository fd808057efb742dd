"""The base of attention modules over pages: checks of arguments, and the rotation of a step."""

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
    """Attention with RoPE whose keys and values are stored in pages.

    Attributes:
        reads: the name of the projection from hidden features to cached numbers, and its shape.
        dtype: dtype of the operands of every matrix product.
        rope: the rotation.
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
            segment_ids: the sequence of each token, if rows hold several. The ids must not decrease
                along a row. Tokens see only those of their own sequence, whose positions start at
                0. Ids of 0 or below, at the end of a row that begins with a higher id, are padding.
                A NaN or an infinity makes the outputs of its token and of later tokens in its
                sequence NaN, and no others.
            cu_seqlens: offsets of n sequences packed in one row (B = 1) instead, starting at 0.
                Tokens from the last offset on are padding.
            positions: positions for the rotation, for tokens that are pieces of longer sequences;
                None uses the positions in their sequences. They do not change which tokens a token
                sees.

        Raises:
            TypeError, ValueError: an argument has a wrong dtype or shape, or a wrong concrete
                value; the message names the argument.
        """
        return self._forward(x, segment_ids, cu_seqlens, positions)

    def _forward(
        self, x: Any, segment_ids: Any, cu_seqlens: Any, positions: Any, **attend_options: Any
    ) -> Float[Array, "B T hidden"]:
        """Implements `__call__`; `attend_options` are further arguments of `_attend_whole`."""
        x, is_nan, positions, bounds = self._isolated(x, segment_ids, cu_seqlens, positions)
        segment_options = {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
        y = self._attend_whole(x, positions, bounds, segment_options, **attend_options)
        return y if is_nan is None else jnp.where(is_nan[..., None], jnp.nan, y)

    def _isolated(
        self, x: Any, segment_ids: Any, cu_seqlens: Any, positions: Any
    ) -> tuple[Array, Bool[Array, "B T"] | None, Int[Array, "B T"], SegmentBounds]:
        """Checks the arguments of `__call__`, and isolates sequences from each other's NaNs.

        Returns:
            (x without numbers that would reach other sequences, the tokens whose outputs are NaN
            for that or None, all positions, the bounds of the sequences).
        """
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
        """`__call__` after the checks; `packed` are the op's keywords for the same sequences."""
        raise NotImplementedError

    def decode_rotation(
        self, seq_lens: Int[Array, "B"], q_len: int, query_lens: Int[Array, "B"] | int | None = None
    ) -> Rotation:
        """The angles of each row's last `q_len` tokens, or of the first `query_lens` of these.

        The layers of a model share them.
        """
        op = f"{type(self).__name__}.decode_rotation"
        return rotation(self.decode_positions(op, seq_lens, q_len, query_lens), self.rope)

    def decode_positions(
        self, op: str, seq_lens: Any, q_len: int, query_lens: Any
    ) -> Int[Array, "B S"]:
        """The positions of the tokens of `decode_rotation`; 0 for padding rows."""
        arguments = OpArguments(op)
        seq_lens = arguments.integers("seq_lens", seq_lens, "B")[1]
        if not isinstance(query_lens, int | None) and getattr(query_lens, "shape", None) != ():
            query_lens = arguments.integers("query_lens", query_lens, "B")[1]
        first = (seq_lens - (q_len if query_lens is None else query_lens))[:, None]
        return jnp.maximum(first + jnp.arange(q_len), 0)

    def _max_tokens(self, kv_cache: Array, block_tables: Any) -> int:
        """The number of tokens that a row's block table has room for."""
        raise NotImplementedError

    def _mask_overflow(
        self,
        y: Float[Array, "1 N hidden"],
        lines: PromptLines,
        kv_cache: Array,
        block_tables: Any,
        rows: Mapping[str, Any] | None,
    ) -> Float[Array, "1 N hidden"]:
        """The output of a mixed step; NaN for the tokens of rows beyond their tables.

        Args:
            block_tables: block tables of the lines.
            rows: the keywords of `decode` for the rows after the lines.
        """
        max_tokens = self._max_tokens(kv_cache, block_tables)
        is_beyond = beyond_table(lines.tokens, lines.seq_lens, max_tokens, lines.query_lens)
        if is_beyond is None:  # then the rows' lengths are concrete or bounded too
            return y
        is_decode_beyond = None
        if rows is not None:
            max_tokens = self._max_tokens(kv_cache, rows["block_tables"])
            is_decode_beyond = beyond_table(1, rows["seq_lens"], max_tokens, None)
            if is_decode_beyond is None:
                is_decode_beyond = jnp.zeros((y.shape[1] - is_beyond.size, 1), bool)
        return jnp.where(lines.join(is_beyond, is_decode_beyond)[..., None], jnp.nan, y)

    def _check_tokens(self, op: str, x: Any, axes: str) -> OpArguments:
        """Checks `x`, and returns the `OpArguments` for the checks of further arguments."""
        name, shape = self.reads
        hidden = getattr(self, name).in_features
        arguments = OpArguments(op, {"hidden": (hidden, f"{name} {shape}")})
        arguments.check_shape("x", x, axes)
        return arguments

    def _check_tables(
        self,
        arguments: OpArguments,
        x: Any,
        block_tables: Any,
        seq_lens: Any,
        query_lens: Any,
        *,
        optional: bool = False,
    ) -> tuple[Any, Any, Any]:
        """The tables and lengths as given, after the check of `query_lens`.

        `query_lens` may be None if it is `optional`. Concrete arguments stay concrete, because the
        ops in a module check them again, which they cannot do with `jax.numpy` arrays under jit.
        """
        if query_lens is not None or not optional:
            arguments.check_query_lens(query_lens, "x", x)
            query_lens = keep_concrete(query_lens)
        return keep_concrete(block_tables), keep_concrete(seq_lens), query_lens
