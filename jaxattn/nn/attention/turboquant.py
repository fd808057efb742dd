"""Grouped-query attention whose cache stores TurboQuant codes instead of keys and values."""

from typing import Any

from flax import nnx
from jaxtyping import Array

from jaxattn import gqa
from jaxattn.arena import Arena
from jaxattn.core.dispatch import Implementation
from jaxattn.core.numerics.rope import Rotation
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.nn.attention.gqa import GroupedQueryAttention
from jaxattn.ops.turboquant.cache_write import check_turbo_cache
from jaxattn.parallel import ContextParallelPages, Parallel


class TurboQuantAttention(GroupedQueryAttention):
    """`GroupedQueryAttention`, with its parameters, over a TurboQuant cache.

    The cache is uint8 [L, N, Hk, bytes] or [N, Hk, bytes]. All pages of a row are on one GPU:
    `prefill` raises ValueError if `parallel` divides the pages of a row, and `decode` if `spread`
    is given.

    The layer first writes new tokens to the cache, and then reads them back with all others. A
    prompt therefore sees the same keys and values in one chunk, in several chunks, and in decode
    steps. Training uses the unquantized keys and values.

    Args:
        preset: preset of the cache; see `gqa.TurboFormat`.
        sizes, options: arguments of `GroupedQueryAttention`.

    Raises:
        ValueError: a size is wrong, or the preset does not support the head dim.
    """

    def __init__(self, preset: str, *sizes: int, rngs: nnx.Rngs, **options: Any):
        super().__init__(*sizes, rngs=rngs, **options)
        self.form = gqa.TurboFormat(preset=preset, head_dim=self.head_dim)

    def _check_cache(
        self, arguments: OpArguments, kv_cache: Any, block_tables: Any, seq_lens: Any, layer: Any
    ) -> None:
        arguments.sizes |= {"Hk": (self.num_kv_heads, "this module")}
        check_turbo_cache(arguments, kv_cache, block_tables, seq_lens, layer, self.form)

    def _attend_prompts(
        self,
        projected: tuple[Array, Array, Array],
        kv_cache: Array,
        rows: tuple[Any, Any, Any],
        layer: Any,
        parallel: Parallel,
        implementation: Implementation | None,
    ) -> tuple[Array, Array, Array]:
        if parallel.context > 1:
            raise ValueError(
                f"TurboQuantAttention.prefill: context={parallel.context} spreads a row's pages "
                "over GPUs, which is not supported; use context=1"
            )
        block_tables, seq_lens, query_lens = rows
        out, kv_cache, _ = self._attend_rows(
            projected,
            kv_cache,
            block_tables=block_tables,
            seq_lens=seq_lens,
            query_lens=query_lens,
            layer=layer,
            implementation=implementation,
        )
        return out, kv_cache, block_tables

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
    ) -> tuple[Array, Array, Arena | None]:
        if spread is not None:
            raise ValueError(
                "TurboQuantAttention.decode: a row's pages must be on one GPU; use spread=None"
            )
        q, k, v = projected
        if rotation is None:
            rotation = self.decode_rotation(seq_lens, q.shape[1], query_lens)
        queries, kv_cache = gqa.turbo_append(
            q,
            k,
            v,
            self.packed_weights() if weights is None else weights,
            kv_cache,
            block_tables,
            seq_lens,
            form=self.form,
            rotation=rotation,
            config=self.rope,
            eps=self.eps,
            dtype=self.dtype,
            query_lens=query_lens,
            layer=layer,
            implementation=implementation,
        )
        out, _, *rest = gqa.turbo_attention(
            queries,
            kv_cache,
            block_tables,
            seq_lens,
            form=self.form,
            query_lens=query_lens,
            layer=layer,
            gate=q[..., self.head_dim :] if self.gated else None,
            schedule=schedule,
            arena=arena,
            implementation=implementation,
            **self._masking,
        )
        return out, kv_cache, rest[0] if rest else None

    def _max_tokens(self, kv_cache: Array, block_tables: Any) -> int:
        return int(block_tables.shape[1] * self.form.page_size(kv_cache))
