"""Multi-head latent attention as a mixer of tokens: its cache, its scratch and its two steps."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxattn import mla
from jaxattn.arena import ArenaSpec
from jaxattn.core.cache.formats import LatentFormat
from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.models.blocks.mixer import Matrix, Stream
from jaxattn.models.blocks.paged_mixer import PagedMixer, attended, spread_of
from jaxattn.models.caches.cache_layouts import LatentPages
from jaxattn.models.caches.layer_cache import Arrays
from jaxattn.models.interface import DecodeBatch
from jaxattn.nn import MultiHeadLatentAttention
from jaxattn.ops.mla.merge_buffer import max_mailbox_shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLA(PagedMixer):
    """Multi-head latent attention over pages of latents, with DeepSeek's parameter names.

    Attributes:
        cache_dtype: Dtype of the pages. None means the compute dtype, "uint8" block-scaled FP8
            ("fp8_block").
        lora_norm_eps: Epsilon of the norms of latents and low-rank queries. None means the
            stream's.
        gated: Whether each head's output is multiplied by its own sigmoid gate.
        batch_invariant: Whether a decode step splits a row only by its own length, so that the
            row's bits do not depend on other rows. With mixed lengths, the attention then takes up
            to 30% longer.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig
    cache_dtype: str | None = None
    lora_norm_eps: float | None = None
    gated: bool = False
    batch_invariant: bool = False

    norms = True
    cache_formats = ("bfloat16", "fp8_block")

    @property
    def cache_name(self) -> str:
        return "latents"

    @property
    def kernels(self) -> dict[str, str]:
        return {"mla_decode": "mla_decode"}

    def in_format(self, name: str) -> "MLA":
        return dataclasses.replace(self, cache_dtype="uint8" if name == "fp8_block" else name)

    def build(self, stream: Stream, rngs: nnx.Rngs) -> MultiHeadLatentAttention:
        return MultiHeadLatentAttention(**self.options(stream), rngs=rngs)

    def options(self, stream: Stream) -> dict[str, Any]:
        """Returns the keyword arguments of the module."""
        return dict(
            hidden_size=stream.hidden_size,
            num_heads=self.num_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            rope=self.rope,
            gated=self.gated,
            fp8=self.fp8,
            eps=stream.eps if self.lora_norm_eps is None else self.lora_norm_eps,
            **stream.dtypes,
        )

    def matrices(self, stream: Stream) -> dict[str, Matrix]:
        hidden, low, heads = stream.hidden_size, self.q_lora_rank, self.num_heads
        queries = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        found = {"q_proj": Matrix(hidden, queries)}
        if low is not None:
            found = {"q_a_proj": Matrix(hidden, low), "q_b_proj": Matrix(low, queries)}
        return found | {
            "kv_a_proj": Matrix(hidden, self.kv_lora_rank + self.qk_rope_head_dim),
            "o_proj": Matrix(heads * self.v_head_dim, hidden),
        }

    def cache(self, stream: Stream, layers: int) -> LatentPages:
        dtype = self.cache_dtype or stream.dtype
        latents = LatentFormat(dtype, self.kv_lora_rank, self.qk_rope_head_dim)
        return LatentPages(name=self.cache_name, layers=layers, format=latents, array=self.array)

    def scratch(
        self, stream: Stream, rows: int, *, q_len: int, max_pages: int, page_size: int
    ) -> ArenaSpec:
        rows, q_len, heads = attended(self.parallel, rows, q_len, self.num_heads)
        return mla.scratch(
            batch=rows,
            q_len=q_len,
            num_heads=heads,
            kv_lora_rank=self.kv_lora_rank,
            dtype=jnp.dtype(stream.dtype),
            max_pages=max_pages,
            page_size=page_size,
        )

    def in_cache(self, layer: LayerIndex) -> Any:
        return layer.index

    @property
    def exchanged(self) -> tuple[int, int, int]:
        latent = self.kv_lora_rank
        return self.num_heads, latent + self.qk_rope_head_dim, latent

    @property
    def meeting(self) -> tuple[int, int] | None:
        return max_mailbox_shape()

    def page_size(self, arrays: Arrays) -> int:
        return int(arrays[self.array].shape[2])

    def shared(
        self,
        module: MultiHeadLatentAttention,
        arrays: Arrays,
        batch: DecodeBatch,
        implementation: Any,
    ) -> dict[str, Any]:
        q_len, page_size = batch.tokens.shape[1], self.page_size(arrays)
        spread = spread_of(self.parallel, batch, page_size)
        _, together, heads = attended(self.parallel, 1, q_len, self.num_heads)
        schedule = mla.decode_schedule(
            batch.seq_lens if spread is None else spread.lens,
            q_len=together,
            num_heads=heads,
            max_pages=batch.block_tables.shape[1],
            page_size=page_size,
            batch_invariant=self.batch_invariant,
            interpret=implementation == "mosaic_gpu_interpret",
        )
        rotation = module.decode_rotation(batch.seq_lens, q_len)
        return {"schedule": schedule, "rotation": rotation, "spread": spread}

    def pack(self, params: Any) -> Float[Array, "repeats W"]:
        kv_norm = params["kv_a_norm"]["weight"][...]
        q_norm = params["q_a_norm"]["weight"][...] if "q_a_norm" in params else None
        return mla.pack_mla_weights(kv_norm, q_norm, rope_dim=self.qk_rope_head_dim)
