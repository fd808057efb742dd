"""DeepSeek's multi-head latent attention: one module for training, prefill and decoding.

The cache stores one latent per token, [kv_lora_rank + qk_rope_head_dim] numbers for all heads
together. Training and prefill expand latents to keys and values. Decoding moves the expansion to
the query and the output (weight absorption), so that the heads attend to the latents themselves.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxattn import mla
from jaxattn.arena import Arena
from jaxattn.core.cache.prompt_packing import PromptLines
from jaxattn.core.dispatch import Implementation
from jaxattn.core.numerics.rope import Rotation
from jaxattn.core.validation.array_checks import FLOATS
from jaxattn.nn.attention.mla_projections import LatentProjections
from jaxattn.nn.attention.table_overflow import nan_beyond_table
from jaxattn.nn.linear import matmul
from jaxattn.ops.attention.segments import SegmentBounds
from jaxattn.ops.linear.norm_linear import PendingNorm, tokens_of
from jaxattn.ops.mla.append import mla_append
from jaxattn.parallel import ALONE, ContextParallelPages, Parallel
from jaxattn.parallel.context_parallel import prefix_of, written_places


class WrittenTokens(NamedTuple):
    """The tokens of a mixed step, after their latents are written to the cache.

    Attributes:
        q: [1, N, Q], the input of the heads' queries for all tokens.
        latent, positions: latents and positions of the prompts' lines.
        rotation: rotation of the other rows; None if there are none.
        kv_cache: the cache with the new latents.
        write_tables: the block tables by which the lines' latents were written.
    """

    q: Array
    latent: Array
    positions: Array
    rotation: Any
    kv_cache: Array
    write_tables: Array


class MultiHeadLatentAttention(LatentProjections):
    """MLA with RoPE; the causal self-attention of a DeepSeek-V2/V3 layer, without its pre-norm.

    Differentiable in reverse mode only: `jax.grad` works, `jax.jvp` raises TypeError.

    Parameters, in DeepSeek's names (`kv_b_proj` is stored as its two halves, head first, the layout
    in which the decode step multiplies them, so that no step transposes or copies weights):
        q_proj [hidden, H * (nope + P)], or with `q_lora_rank` q_a_proj, q_a_norm and q_b_proj
        kv_a_proj [hidden, R + P]   kv_a_norm [R]   w_uk [H, nope, R]   w_uv [H, R, Dv]
        o_proj [H * Dv, hidden]   and with `gated` g_proj [hidden, H]

    Args:
        rope: `rope.dim` must be `qk_rope_head_dim`; None is RoPE with theta 10000, interleaved,
            without scaling. A RopeConfig with theta None rotates nothing.
        gated: each head's output is multiplied by the head's sigmoid(g_proj(x)) (Ling-3.0).
        fp8: the names of the linears whose weights are FP8; see `Fp8Linear`.
        dtype: the operands of every matrix product (sums are float32).
        param_dtype: the dtype that the weights are stored in.
        out_init_scale: scale of the initial o_proj, for deep residual stacks.

    Raises:
        ValueError: a size is not a positive integer, or `rope.dim` differs from `qk_rope_head_dim`.
    """

    def _attend_whole(
        self, x: Array, positions: Array, bounds: SegmentBounds, segment_options: dict[str, Any]
    ) -> Float[Array, "B T hidden"]:
        q_nope, q_pe = self._queries(x, positions)
        latent = self._latents(x, positions)
        compressed, k_pe = jnp.split(latent, [self.kv_lora_rank], axis=-1)
        heads = (*x.shape[:2], self.num_heads)
        with jax.named_scope("mla_expand"):
            w_uk = self.w_uk[...].reshape(-1, self.kv_lora_rank).T
            w_uv = self.w_uv[...].swapaxes(0, 1).reshape(self.kv_lora_rank, -1)
            k_nope = matmul(compressed, w_uk, self.dtype, self.dtype).reshape(*heads, -1)
            v = matmul(compressed, w_uv, self.dtype, self.dtype).reshape(*heads, -1)
            q = jnp.concatenate([q_nope, q_pe], axis=-1)
        out, _ = mla.causal_attention(q, k_nope, v, k_pe=k_pe, scale=self.scale, **segment_options)
        return self._project_out(x, out)

    def prefill(
        self,
        x: Float[Array, "B T hidden"],
        kv_cache: Float[Array, "..."],
        *,
        block_tables: Int[Array, "B M"],
        seq_lens: Int[Array, "B"],
        query_lens: Int[Array, "B"],
        layer: int | Int[Array, ""] | None = None,
        kv_scale: Array | float | None = None,
        parallel: Parallel = ALONE,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T hidden"], Array]:
        """Processes a chunk of each row's prompt: caches the chunk's latents, and attends to these
        and to earlier ones.

        Args:
            x: the chunk, left-aligned; tokens from `query_lens[b]` on are padding.
            kv_cache: [L, N, C, D] with `layer`, or [N, C, D]; the dtype determines the format,
                including FP8 formats (`jaxattn.mla.LatentFormat`).
            block_tables: int32 page ids; those within a row's length from 0 to N - 1.
            seq_lens: the row's length after this chunk, at most M * C; 0 is a padding row.
            kv_scale: required for a float8_e4m3fn cache.
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
        """
        arguments = self._check_tokens("MultiHeadLatentAttention.prefill", x, "B T hidden")
        arguments.check_paged(kv_cache, block_tables, seq_lens, layer)
        block_tables, seq_lens, query_lens = self._check_tables(
            arguments, x, block_tables, seq_lens, query_lens
        )
        rows = block_tables, seq_lens, query_lens
        q, latents = self._down(x)
        if self.q_lora_rank is not None:
            q = self.q_a_norm(q)
        positions = self.decode_positions(arguments.op, seq_lens, x.shape[1], query_lens)
        latent, kv_cache, write_tables = self._write_prompts(
            latents, positions, kv_cache, rows, layer, kv_scale, parallel
        )
        out = self._attend_prompts(
            self._heads(x, q), latent, positions, kv_cache, rows,
            layer=layer, kv_scale=kv_scale, parallel=parallel, implementation=implementation,
        )  # fmt: skip
        return self._output(x, out, kv_cache, write_tables, seq_lens, query_lens), kv_cache

    def _write_prompts(
        self,
        latents: Array,
        positions: Array,
        kv_cache: Array,
        rows: tuple[Any, Any, Any],
        layer: Any,
        kv_scale: Any,
        parallel: Parallel,
    ) -> tuple[Array, Array, Array]:
        """(the chunks' latents, the cache with them, the tables by which they were written).

        `rows` are block tables, lengths including the chunk, and lengths of the chunk, for each
        line of `latents`.
        """
        block_tables, seq_lens, query_lens = rows
        latent = self._latents_of(latents, positions)
        latent = latent.astype(self._query_dtype(kv_cache))
        write_tables = written_places(parallel, block_tables)
        kv_cache = mla.mla_cache_write(
            kv_cache,
            latent,
            write_tables,
            seq_lens,
            query_lens=query_lens,
            layer=layer,
            kv_scale=kv_scale,
        )
        return latent, kv_cache, write_tables

    def _attend_prompts(
        self,
        q: Array,
        latent: Array,
        positions: Array,
        kv_cache: Array,
        rows: tuple[Any, Any, Any],
        *,
        lines: Array | None = None,
        layer: Any,
        kv_scale: Any,
        parallel: Parallel,
        implementation: Implementation | None,
    ) -> Array:
        """The heads' outputs for chunks of prompts.

        `rows` is as in `_write_prompts`; with `lines`, it has an entry for each row.
        """
        block_tables, seq_lens, query_lens = rows
        read_cache, tables, read_layer = prefix_of(parallel, kv_cache, block_tables, layer)
        out, _ = mla.mla_prefill(
            jnp.concatenate(self._apply_rope(q, positions), axis=-1),
            latent,
            self.w_uk[...].astype(self.dtype),
            self.w_uv[...].astype(self.dtype),
            read_cache,
            tables,
            seq_lens,
            query_lens,
            scale=self.scale,
            lines=lines,
            layer=read_layer,
            kv_scale=kv_scale,
            implementation=implementation,
        )
        return out

    def mixed(
        self,
        x: Float[Array, "1 N hidden"],
        kv_cache: Array,
        *,
        lines: PromptLines,
        block_tables: Int[Array, "B M"],
        seq_lens: Int[Array, "B"],
        query_lens: Int[Array, "B"],
        rows: Mapping[str, Any] | None,
        layer: int | Int[Array, ""] | None = None,
        kv_scale: Array | float | None = None,
        parallel: Parallel = ALONE,
        implementation: Implementation | None = None,
        **unused_options: Any,
    ) -> tuple[Any, ...]:
        """Processes pieces of B rows' prompts in lines, followed by one token of each decoding
        row. One product projects all tokens.

        Args:
            x: the tokens of all lines, and of `rows`.
            lines: which tokens each row has.
            seq_lens, query_lens: lengths of the rows of the lines, as in `prefill`.
            rows: the keywords of `decode`; None if there are no other rows.
            unused_options: arguments about the prompts' rows that only other kinds of layers use.

        Returns:
            (float32 [1, N, hidden], the cache, and the remaining results of `decode`).
        """
        tokens = self._write_mixed(
            x, kv_cache, lines, block_tables, rows,
            layer=layer, kv_scale=kv_scale, parallel=parallel, implementation=implementation,
        )  # fmt: skip
        kv_cache = tokens.kv_cache
        prompt_q, decode_q = lines.split(self._heads(x, tokens.q))
        out = self._attend_prompts(
            prompt_q, tokens.latent, tokens.positions, kv_cache,
            (block_tables, seq_lens, query_lens),
            lines=None if lines.one_each else lines.rows,
            layer=layer, kv_scale=kv_scale, parallel=parallel,
            implementation=implementation if implementation == "xla" else None,
        )  # fmt: skip
        values, rest = None, [None]
        if rows is not None:
            decode_options = {
                name: rows[name] for name in rows if name not in ("rotation", "weights")
            }
            values, *rest = self._attend_rows(
                decode_q, tokens.rotation, kv_cache, layer=layer, kv_scale=kv_scale,
                implementation=implementation, **decode_options,
            )  # fmt: skip
        y = self._join_mixed(x, out, values, lines, tokens, rows)
        return y, kv_cache, *rest

    def _write_mixed(
        self,
        x: Array,
        kv_cache: Array,
        lines: PromptLines,
        block_tables: Any,
        rows: Mapping[str, Any] | None,
        *,
        layer: Any,
        kv_scale: Any,
        parallel: Parallel,
        implementation: Implementation | None,
    ) -> WrittenTokens:
        """Projects the tokens of `mixed` and writes them to the cache."""
        q, latents = self._down(x)
        prompt_q, compressed = lines.split(q)
        line_latents, decode_latents = lines.split(latents)
        op = f"{type(self).__name__}.mixed"
        positions = self.decode_positions(op, lines.seq_lens, lines.tokens, lines.query_lens)
        line_rows = lines.of_row(jnp.asarray(block_tables), 0), lines.seq_lens, lines.query_lens
        latent, kv_cache, write_tables = self._write_prompts(
            line_latents, positions, kv_cache, line_rows, layer, kv_scale, parallel
        )
        rotation: Any = None
        if rows is not None:
            rotation = self._rotation_of(rows["seq_lens"], rows.get("rotation"))
            compressed, kv_cache = self._append_rows(
                decode_latents, compressed, kv_cache,
                rows["block_tables"], rows["seq_lens"], rotation=rotation,
                weights=rows.get("weights"), kv_scale=kv_scale, layer=layer,
                implementation=implementation,
            )  # fmt: skip
        if self.q_lora_rank is not None:
            normed_q = self.q_a_norm(prompt_q).astype(compressed.dtype)
            q = lines.join(normed_q, None if rows is None else compressed)
        return WrittenTokens(q, latent, positions, rotation, kv_cache, write_tables)

    def _join_mixed(
        self,
        x: Array,
        out: Array,
        values: Array | None,
        lines: PromptLines,
        tokens: WrittenTokens,
        rows: Mapping[str, Any] | None,
    ) -> Float[Array, "1 N hidden"]:
        """The projection of the heads' outputs in `mixed`, for the lines and for the other rows."""
        values = None if values is None else values.astype(out.dtype)
        y = self._project_out(x, lines.join(out, values))
        return self._mask_overflow(y, lines, tokens.kv_cache, tokens.write_tables, rows)

    def decode(
        self,
        x: Float[Array, "B S hidden"] | PendingNorm,
        kv_cache: Float[Array, "..."],
        *,
        block_tables: Int[Array, "B M"],
        seq_lens: Int[Array, "B"],
        query_lens: Int[Array, "B"] | None = None,
        layer: int | Int[Array, ""] | None = None,
        kv_scale: Array | float | None = None,
        schedule: mla.Schedule | None = None,
        rotation: Rotation | None = None,
        weights: Float[Array, "*L W"] | None = None,
        spread: ContextParallelPages | None = None,
        arena: Arena | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Any, ...]:
        """Decodes the next S tokens of each row over the paged latent cache, with absorbed weights.

        Args:
            kv_cache: [L, N, C, D] with `layer`, or [N, C, D]; the dtype determines the format,
                including FP8 formats (`jaxattn.mla.LatentFormat`).
            block_tables: int32 page ids; those within a row's length from 0 to N - 1.
            seq_lens: the row's length with the S new tokens, at most M * C; 0 is a padding row.
            query_lens: new tokens of each row, the first of its S; the rest is padding. S, if None.
            kv_scale: required for a float8_e4m3fn cache.
            schedule: `mla.decode_schedule` of these `seq_lens`, for the layers that share it.
            rotation: `decode_rotation` of these `seq_lens`, for the layers that share it.
            weights: `packed_weights()`, made once when the model is loaded, or the stack of all
                layers, which `layer` indexes. None packs the weights in this call.
            spread: a `ContextParallelPages`, inside `jax.shard_map`, if several GPUs each store a
                part of each row's pages. `block_tables` are then its `places`, `schedule` is the
                schedule of its `lens`, and the op combines the heads of all these GPUs.
            arena: scratch of at least `mla.scratch(batch=B, q_len=S, num_heads=H, ...)`; with
                `spread`, for B * S rows of one token.

        Returns:
            (float32 [B, S, hidden], the cache with the new latents, the arena or None; and the
            mailbox of a `spread` that has one). The output at padding is exactly 0, and padding
            writes nothing. A traced row whose length exceeds its table cannot be rejected: its
            output is NaN, and the row writes nothing.

        Raises:
            TypeError, ValueError: an argument has a wrong dtype or shape, or a concrete length or
                page is out of range; the message names the argument.
            Refusal: the requested implementation does not support the call; the message says why.
        """
        if self.g_proj is not None:  # the gate needs x itself
            x = tokens_of(x)
        compressed, rotation, kv_cache, rows = self._write_rows(
            x, kv_cache, block_tables, seq_lens, query_lens, rotation=rotation, weights=weights,
            layer=layer, kv_scale=kv_scale, implementation=implementation,
        )  # fmt: skip
        block_tables, seq_lens, query_lens = rows
        values, *rest = self._attend_rows(
            self._heads(x, compressed), rotation, kv_cache,
            block_tables=block_tables, seq_lens=seq_lens, query_lens=query_lens,
            layer=layer, kv_scale=kv_scale, schedule=schedule, spread=spread, arena=arena,
            implementation=implementation,
        )  # fmt: skip
        return self._output(x, values, kv_cache, *rows), kv_cache, *rest

    def _write_rows(
        self,
        x: Array | PendingNorm,
        kv_cache: Array,
        block_tables: Any,
        seq_lens: Any,
        query_lens: Any,
        *,
        rotation: Rotation | None,
        weights: Array | None,
        layer: Any,
        kv_scale: Any,
        implementation: Implementation | None,
    ) -> tuple[Array, Rotation, Array, tuple[Any, Any, Any]]:
        """Writes the latents of the tokens of `decode`.

        Returns:
            (the input of the heads' queries, the rotation, the cache, the checked tables and
            lengths).
        """
        arguments = self._check_tokens(f"{type(self).__name__}.decode", x, "B S hidden")
        arguments.check_paged(kv_cache, block_tables, seq_lens, layer)
        rows = self._check_tables(arguments, x, block_tables, seq_lens, query_lens, optional=True)
        block_tables, seq_lens, query_lens = rows
        q, latents = self._down(x)
        rotation = self._rotation_of(seq_lens, rotation, x.shape[1], query_lens)
        compressed, kv_cache = self._append_rows(
            latents, q, kv_cache, block_tables, seq_lens,
            rotation=rotation, weights=weights, kv_scale=kv_scale, layer=layer,
            query_lens=query_lens, implementation=implementation,
        )  # fmt: skip
        return compressed, rotation, kv_cache, rows

    def _rotation_of(
        self, seq_lens: Any, rotation: Rotation | None, tokens: int = 1, query_lens: Any = None
    ) -> Rotation:
        if rotation is not None:
            return rotation
        return self.decode_rotation(seq_lens, tokens, tokens if query_lens is None else query_lens)

    def _append_rows(
        self,
        latents: Array,
        q: Array,
        kv_cache: Array,
        block_tables: Any,
        seq_lens: Any,
        *,
        rotation: Rotation,
        weights: Array | None,
        kv_scale: Any,
        layer: Any,
        query_lens: Any = None,
        implementation: Implementation | None,
    ) -> tuple[Array, Array]:
        """(the input of the heads' queries, the cache with the rows' new latents)."""
        compressed, kv_cache = mla_append(
            latents,
            None if self.q_lora_rank is None else q,
            self.packed_weights() if weights is None else weights,
            kv_cache,
            block_tables,
            seq_lens,
            rotation=rotation,
            config=self.rope,
            eps=self.kv_a_norm.eps,
            dtype=self.dtype,
            query_lens=query_lens,
            kv_scale=kv_scale,
            layer=layer,
            implementation=implementation,
        )
        return q if compressed is None else compressed, kv_cache

    def _attend_rows(
        self,
        q: Array,
        rotation: Rotation,
        kv_cache: Array,
        *,
        block_tables: Any,
        seq_lens: Any,
        query_lens: Any = None,
        layer: Any,
        kv_scale: Any,
        schedule: mla.Schedule | None = None,
        spread: ContextParallelPages | None = None,
        arena: Arena | None = None,
        implementation: Implementation | None,
    ) -> tuple[Any, ...]:
        """(heads' outputs, the arena or None, the mailboxes), for queries before rotation."""
        # Decode's kernel reads packed rows in groups of 8, and padding them would be a launch of
        # its own. The heads of several GPUs must be contiguous.
        fills = spread is None and q.shape[1] == 1 and self.kv_lora_rank % 128 == 0
        queries = self._latent_queries(q, rotation, -self.num_heads % 8 if fills else 0)
        queries = [each.astype(self._query_dtype(kv_cache)) for each in queries]

        def attend(
            queries: Any, tables: Any, lens: Any, query_lens: Any = None, merge: Any = None
        ) -> tuple[Array, Any, list[Any]]:
            query: Any = tuple(queries) if len(queries) > 1 else queries[0]
            decode_options: Any = dict(
                scale=self.scale,
                layer=layer,
                kv_lora_rank=self.kv_lora_rank,
                kv_scale=kv_scale,
                schedule=schedule,
                arena=arena,
                implementation=implementation,
            )
            if merge is not None:
                combined = mla.mla_decode_context_parallel(
                    query, kv_cache, tables, lens, merge=merge, **decode_options
                )
                out, new_arena, mailbox = combined
                return out, mailbox, [] if new_arena is None else [new_arena]
            out, lse, *arenas = mla.mla_decode(
                query, kv_cache, tables, lens, query_lens=query_lens, **decode_options
            )
            return out, lse, arenas

        mailboxes: list[Any] = []
        if spread is None:
            out, _, arenas = attend(queries, block_tables, seq_lens, query_lens)
        else:
            out, arenas, mailboxes = spread.attend(queries, attend)
        return self._values_of(out), arenas[0] if arenas else None, *mailboxes

    def _values_of(self, out: Array) -> Array:
        """The heads' values, from outputs in the latent space, which may end with spare heads."""
        values = self._absorbed(out, self.w_uv_in_stack)
        if values is None:
            values = mla.absorb_output(
                out[:, :, : self.num_heads], self.w_uv[...].astype(self.dtype)
            )
        return values

    def _query_dtype(self, kv_cache: Array) -> jnp.dtype:
        """The dtype of queries and latents: the cache's if it holds plain latents, else `dtype`."""
        return kv_cache.dtype if str(kv_cache.dtype) in FLOATS else self.dtype

    def _output(
        self,
        x: Array | PendingNorm,
        out: Array,
        kv_cache: Array,
        block_tables: Any,
        seq_lens: Any,
        query_lens: Any,
    ) -> Float[Array, "B T hidden"]:
        """The projection of the heads; NaN for the new tokens of a traced row beyond its table."""
        y = self._project_out(x, out)
        return nan_beyond_table(y, seq_lens, self._max_tokens(kv_cache, block_tables), query_lens)

    def _max_tokens(self, kv_cache: Array, block_tables: Any) -> int:
        return int(block_tables.shape[1] * kv_cache.shape[-2])
