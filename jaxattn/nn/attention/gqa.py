"""Grouped-query attention: one module for training, prefill and decoding.

The cache stores the keys and values of each token, [Hk, D] numbers each. Each key-value head serves
H / Hk query heads.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn import gqa
from jaxattn.arena import Arena
from jaxattn.core.cache.prompt_packing import PromptLines
from jaxattn.core.dispatch import Implementation
from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.numerics.rope import Rotation
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.nn.attention.gqa_projections import GroupedQueryProjections
from jaxattn.nn.attention.table_overflow import nan_beyond_table
from jaxattn.ops.attention.segments import SegmentBounds
from jaxattn.ops.gqa.cache_write import check_cache
from jaxattn.ops.linear.norm_linear import PendingNorm
from jaxattn.parallel import ALONE, ContextParallelPages, Parallel
from jaxattn.parallel.context_parallel import own_of_shared, prefix_of, written_places


class GroupedQueryAttention(GroupedQueryProjections):
    """The causal self-attention of Qwen, Llama and gpt-oss, without its pre-norm.

    Differentiable in reverse mode only: `jax.grad` works, `jax.jvp` raises TypeError.

    Parameters, in the names of Qwen's checkpoints:
        q_proj [hidden, H * D], or with `gated` [hidden, H * 2 D], with D queries and then D gates
            per head
        k_proj, v_proj [hidden, Hk * D]   o_proj [H * D, hidden]
        q_bias [H * D], k_bias, v_bias [Hk * D], with `biases`
        o_bias [hidden], with `out_bias`   sinks float32 [H], with `sinks`
        q_norm, k_norm [D], with `qk_norm`
        q_heads_norm [H * D], k_heads_norm [Hk * D], with `heads_norm`
        kv_scale float32 [2, Hk], with `scaled_cache`: the factors of an FP8 cache's keys and values

    Args:
        head_dim: D, of queries, keys and values.
        rope: `rope.dim` is how many dims are rotated, the first of D.
        qk_norm: RMS norms of each head's query and key, before they are rotated.
        gated: the output is multiplied by sigmoid(gate) before o_proj.
        heads_norm: RMS norms of all heads of a query or key together, before they are rotated
            (OLMo 2).
        biases: q_proj, k_proj and v_proj have a bias (Qwen2).
        out_bias: o_proj has a bias (gpt-oss).
        query_scaling: queries are multiplied by a factor that grows with their positions (Llama 4);
            not with `qk_norm`.
        window: the number of keys that a token sees, including its own; None is all earlier keys.
        sinks: each head has a logit without a value in its softmax (gpt-oss).
        scaled_cache: the cache is FP8 (float8_e4m3fn).
        fp8: the names of the linears whose weights are FP8; see `Fp8Linear`.
        dtype: the operands of every matrix product (sums are float32).
        param_dtype: the dtype that the weights are stored in.
        norm_dtype: the dtype of the norms' weights; None is `param_dtype`.
        out_init_scale: scale of the initial o_proj, for deep residual stacks.
        parallel: the layout of the GPUs that divide the heads. Norms over all heads sum over these
            GPUs, and each GPU adds its part of o_bias.

    Raises:
        ValueError: a size is not a positive integer, H is not a multiple of Hk, `rope` rotates more
            dims than a head has, or two options exclude each other.
    """

    def _attend_whole(
        self, x: Array, positions: Array, bounds: SegmentBounds, segment_options: dict[str, Any]
    ) -> Float[Array, "B T hidden"]:
        q, k, v, gate = self._apply_rope(*self._projected(x, positions), positions)
        out, _ = gqa.gqa_attention(q, k, v, gate=gate, **segment_options, **self._masking)
        return self._project_out(out)

    def prefill(
        self,
        x: Float[Array, "B T hidden"],
        kv_cache: Float[Array, "..."],
        *,
        block_tables: Int[Array, "B M"],
        seq_lens: Int[Array, "B"],
        query_lens: Int[Array, "B"],
        layer: int | Int[Array, ""] | LayerIndex | None = None,
        parallel: Parallel = ALONE,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T hidden"], Array]:
        """Processes a chunk of each row's prompt: caches the chunk's keys and values, and attends
        to these and to earlier ones.

        Args:
            x: the chunk, left-aligned; tokens from `query_lens[b]` on are padding.
            kv_cache: [L, N, 2, C, Hk, D] with `layer`, or [N, 2, C, Hk, D].
            block_tables: int32 page ids; those within a row's length from 0 to N - 1.
            seq_lens: the row's length after this chunk, at most M * C; 0 is a padding row.
            parallel: the layout of GPUs that each store a part of each row's pages, inside
                `jax.shard_map`. `block_tables` are then stripes
                (`jaxattn.parallel.ContextParallelPages`).

        Returns:
            (float32 [B, T, hidden], the cache). The output at padding is exactly 0. A traced row
            whose length exceeds its table cannot be rejected: its output is NaN, and the row writes
            nothing.

        Raises:
            TypeError, ValueError: an argument has a wrong dtype or shape, or a concrete length or
                page is out of range; the message names the argument.
            Refusal: the requested implementation does not support the call; the message says why.
        """
        arguments = self._check_tokens(f"{type(self).__name__}.prefill", x, "B T hidden")
        self._check_cache(arguments, kv_cache, block_tables, seq_lens, layer)
        block_tables, seq_lens, query_lens = self._check_tables(
            arguments, x, block_tables, seq_lens, query_lens
        )
        rows = block_tables, seq_lens, query_lens
        projected = self._new_heads(arguments.op, x, seq_lens, query_lens)
        out, kv_cache, write_tables = self._attend_prompts(
            projected, kv_cache, rows, layer, parallel, implementation
        )
        return self._output(out, kv_cache, write_tables, seq_lens, query_lens), kv_cache

    def _attend_prompts(
        self,
        projected: tuple[Array, Array, Array],
        kv_cache: Array,
        rows: tuple[Any, Any, Any],
        layer: Any,
        parallel: Parallel,
        implementation: Implementation | None,
    ) -> tuple[Array, Array, Array]:
        """(heads' outputs, the cache, the tables by which it was written) for chunks of prompts.

        `rows` are block tables, lengths including the chunk, and lengths of the chunk.
        """
        block_tables, seq_lens, query_lens = rows
        positions = (seq_lens - query_lens)[:, None] + jnp.arange(projected[0].shape[1])
        dtype, scale = self._query_dtype(kv_cache), self._scale
        q, k, v, gate = self._apply_rope(*projected, jnp.maximum(positions, 0), dtype=dtype)
        write_tables = written_places(parallel, block_tables)
        kv_cache = gqa.gqa_cache_write(
            kv_cache,
            k,
            v,
            write_tables,
            seq_lens,
            query_lens=query_lens,
            layer=layer,
            kv_scale=scale,
        )
        if scale is not None:
            # Round the chunk's own tokens, so that they are the same now and when later tokens read
            # them.
            k, v = self._as_stored(k, v)
        read_cache, tables, read_layer = prefix_of(parallel, kv_cache, block_tables, layer)
        k, v, read_cache = (own_of_shared(each, parallel) for each in (k, v, read_cache))
        if scale is not None:
            scale = own_of_shared(scale[..., None], parallel)[..., 0]
        out, _ = gqa.gqa_prefill(
            q,
            k,
            v,
            read_cache,
            tables,
            seq_lens,
            query_lens,
            layer=read_layer,
            kv_scale=scale,
            gate=gate,
            implementation=implementation,
            **self._masking,
        )
        return out, kv_cache, write_tables

    def mixed(
        self,
        x: Float[Array, "1 N hidden"],
        kv_cache: Array,
        *,
        lines: PromptLines,
        block_tables: Int[Array, "B M"],
        rows: Mapping[str, Any] | None,
        layer: int | Int[Array, ""] | LayerIndex | None = None,
        parallel: Parallel = ALONE,
        implementation: Implementation | None = None,
        **unused_options: Any,
    ) -> tuple[Any, ...]:
        """Processes pieces of B rows' prompts in lines, followed by one token of each decoding
        row. One product projects all tokens.

        Args:
            x: the tokens of all lines, and of `rows`.
            lines: which tokens each row of `block_tables` has.
            rows: the keywords of `decode`; None if there are no other rows.
            unused_options: arguments about the prompts' rows that only other kinds of layers use.

        Returns:
            (float32 [1, N, hidden], the cache, and the remaining results of `decode`).
        """
        positions = self._mixed_positions(lines, rows) if self.query_scaling else None
        projected = map(lines.split, self._projected(x, positions))
        prompts, *_ = tokens_by_kind = list(zip(*projected, strict=True))
        tables = lines.of_row(block_tables, 0)
        line_rows = tables, lines.seq_lens, lines.query_lens
        prompt_implementation = implementation if implementation == "xla" else None
        out, kv_cache, write_tables = self._attend_prompts(
            prompts, kv_cache, line_rows, layer, parallel, prompt_implementation
        )
        decode_out, rest = None, [None]
        if rows is not None:
            # A barrier: the prompts read the cache before the rows write to it. Otherwise XLA would
            # copy the cache for the later read.
            out, kv_cache = lax.optimization_barrier((out, kv_cache))
            decode_out, kv_cache, *rest = self._attend_rows(
                tokens_by_kind[1], kv_cache, layer=layer, implementation=implementation, **rows
            )
        y = self._project_out(lines.join(out, decode_out))
        return self._mask_overflow(y, lines, kv_cache, write_tables, rows), kv_cache, *rest

    def decode(
        self,
        x: Float[Array, "B S hidden"] | PendingNorm,
        kv_cache: Float[Array, "..."],
        *,
        block_tables: Int[Array, "B M"],
        seq_lens: Int[Array, "B"],
        query_lens: Int[Array, "B"] | None = None,
        layer: int | Int[Array, ""] | LayerIndex | None = None,
        schedule: gqa.PairSchedule | None = None,
        rotation: Rotation | None = None,
        weights: Float[Array, "*L W"] | None = None,
        spread: ContextParallelPages | None = None,
        arena: Arena | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Any, ...]:
        """Decodes the next S tokens of each row over the paged cache.

        Args:
            kv_cache: [L, N, 2, C, Hk, D] with `layer`, or [N, 2, C, Hk, D].
            block_tables: int32 page ids; those within a row's length from 0 to N - 1.
            seq_lens: the row's length with the S new tokens, at most M * C; 0 is a padding row.
            query_lens: new tokens of each row, the first of its S; the rest is padding. S, if None.
            schedule: `gqa.decode_schedule` of these `seq_lens`, for the layers that share it.
            rotation: `decode_rotation` of these `seq_lens`, for the layers that share it.
            weights: `packed_weights()`, made once when the model is loaded, or the stack of all
                layers, which `layer` indexes. None packs the weights in this call.
            spread: a `ContextParallelPages`, inside `jax.shard_map`, if several GPUs each store a
                part of each row's pages. `block_tables` are then its `places`, `schedule` is the
                schedule of its `lens`, and the op combines the heads of all these GPUs. Neither
                with a window nor with sinks.
            arena: scratch of at least `gqa.scratch(batch=B, q_len=S, num_heads=H, ...)`; with
                `spread`, for B * S rows of one token.

        Returns:
            (float32 [B, S, hidden], the cache with the new keys and values, the arena or None; and
            the mailbox of a `spread` that has one). The output at padding is exactly 0, and padding
            writes nothing. A traced row whose length exceeds its table cannot be rejected: its
            output is NaN, and the row writes nothing.

        Raises:
            TypeError, ValueError: an argument has a wrong dtype or shape, or a concrete length or
                page is out of range; the message names the argument.
            Refusal: the requested implementation does not support the call; the message says why.
        """
        arguments = self._check_tokens(f"{type(self).__name__}.decode", x, "B S hidden")
        self._check_cache(arguments, kv_cache, block_tables, seq_lens, layer)
        block_tables, seq_lens, query_lens = self._check_tables(
            arguments, x, block_tables, seq_lens, query_lens, optional=True
        )
        out, kv_cache, *rest = self._attend_rows(
            self._new_heads(arguments.op, x, seq_lens, query_lens),
            kv_cache,
            block_tables=block_tables,
            seq_lens=seq_lens,
            query_lens=query_lens,
            layer=layer,
            schedule=schedule,
            rotation=rotation,
            weights=weights,
            spread=spread,
            arena=arena,
            implementation=implementation,
        )
        return self._output(out, kv_cache, block_tables, seq_lens, query_lens), kv_cache, *rest

    def _attend_rows(
        self,
        projected: tuple[Array, Array, Array],
        kv_cache: Array,
        *,
        block_tables: Any,
        seq_lens: Any,
        query_lens: Any = None,
        layer: Any,
        schedule: gqa.PairSchedule | None = None,
        rotation: Rotation | None = None,
        weights: Array | None = None,
        spread: ContextParallelPages | None = None,
        arena: Arena | None = None,
        implementation: Implementation | None,
    ) -> tuple[Any, ...]:
        """The heads' outputs instead of the projected ones, and the other results of `decode`."""
        q, k, v = projected
        if rotation is None:
            rotation = self.decode_rotation(seq_lens, q.shape[1], query_lens)
        addressing = (block_tables, seq_lens)
        queries, kv_cache, *gates = gqa.gqa_append(
            q,
            k,
            v,
            self.packed_weights() if weights is None else weights,
            kv_cache,
            *addressing,
            rotation=rotation,
            config=self.rope,
            eps=self.eps,
            dtype=self._query_dtype(kv_cache),
            query_lens=query_lens,
            kv_scale=self._scale,
            layer=layer,
            gates=self.gated,
            implementation=implementation,
        )

        def attend(
            heads: list[Array], tables: Any, lens: Any, query_lens: Any = None
        ) -> tuple[Array, Array, list[Any]]:
            out, lse, *arenas = gqa.gqa_decode(
                heads[0],
                kv_cache,
                tables,
                lens,
                query_lens=query_lens,
                kv_scale=self._scale,
                layer=layer,
                gate=heads[1] if len(heads) > 1 else None,
                schedule=schedule,
                arena=arena,
                implementation=implementation,
                **self._masking,
            )
            return out, lse, arenas

        heads = [queries, *gates]
        mailboxes: list[Any] = []
        if spread is None:
            out, _, arenas = attend(heads, *addressing, query_lens)
        else:
            out, arenas, mailboxes = spread.attend(heads, attend)
        return out, kv_cache, arenas[0] if arenas else None, *mailboxes

    def _query_dtype(self, kv_cache: Array) -> Any:
        """The dtype of queries: the cache's, or the compute dtype for an FP8 cache."""
        return self.dtype if self.scaled_cache else kv_cache.dtype

    def _as_stored(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Keys and values after a round trip through the FP8 cache."""
        cache_format, scale = gqa.KVFormat("fp8", self.head_dim), self._scale
        keys_and_values = cache_format.round_trip(jnp.stack([k, v], axis=2), scale)
        return keys_and_values[:, :, 0].astype(k.dtype), keys_and_values[:, :, 1].astype(v.dtype)

    def _check_cache(
        self, arguments: OpArguments, kv_cache: Any, block_tables: Any, seq_lens: Any, layer: Any
    ) -> None:
        sizes = {"Hk": self.num_kv_heads, "D": self.head_dim}
        arguments.sizes |= {name: (size, "this module") for name, size in sizes.items()}
        check_cache(arguments, kv_cache, block_tables, seq_lens, layer)

    def _new_heads(
        self, op: str, x: Array | PendingNorm, seq_lens: Any, query_lens: Any
    ) -> tuple[Array, Array, Array]:
        """`_projected` for each row's new tokens."""
        if self.query_scaling is None:
            return self._projected(x)
        return self._projected(x, self.decode_positions(op, seq_lens, x.shape[1], query_lens))

    def _mixed_positions(
        self, lines: PromptLines, rows: Mapping[str, Any] | None
    ) -> Int[Array, "1 N"]:
        """The positions of the tokens of `mixed`."""
        op = f"{type(self).__name__}.mixed"
        line_positions = self.decode_positions(op, lines.seq_lens, lines.tokens, lines.query_lens)
        decode_positions = (
            None if rows is None else self.decode_positions(op, rows["seq_lens"], 1, None)
        )
        return lines.join(line_positions, decode_positions)

    def _output(
        self, out: Array, kv_cache: Array, block_tables: Any, seq_lens: Any, query_lens: Any
    ) -> Float[Array, "B T hidden"]:
        """The projection of the heads; NaN for the new tokens of a traced row beyond its table."""
        y = self._project_out(out)
        return nan_beyond_table(y, seq_lens, self._max_tokens(kv_cache, block_tables), query_lens)

    def _max_tokens(self, kv_cache: Array, block_tables: Any) -> int:
        return int(block_tables.shape[1] * kv_cache.shape[-3])
