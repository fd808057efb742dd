"""The arguments of a call of `mla_decode`, after the op has checked them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.arena import Arena
from jaxattn.core.cache.formats import LatentFormat
from jaxattn.core.cache.symmetric_buffer import SymmetricBuffer
from jaxattn.core.dispatch import without_gradient
from jaxattn.kernels.attention.split_kv_schedule import Schedule
from jaxattn.kernels.mla.decode.latent_tile import RANK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContextParallelMerge:
    """The buffer and the mesh axes with which GPUs merge their outputs, inside of `jax.shard_map`.

    Attributes:
        mailbox: The symmetric buffer of these GPUs, with the shape `merge_buffer_shape`.
        axes: The mesh axes of the GPUs; for the kernel, all axes of the mesh, in its order.
        heads: The number of heads of q that belong to the GPUs. The other heads are zeros, which
            fill a tile of the kernel. None: all heads.
    """

    mailbox: SymmetricBuffer
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    heads: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MlaDecodeCall:
    """The arguments of one call; `jaxattn.mla.mla_decode` documents them.

    Attributes:
        q: [B, S, H, D], or a pair with R and P of its dims.
        layer: int32 [1] after `stacked` has been called.
        merge: The GPUs whose outputs are merged; its heads are the first ones of q's.
    """

    q: jax.Array | tuple[jax.Array, jax.Array]
    kv_cache: jax.Array
    block_tables: jax.Array
    seq_lens: jax.Array
    scale: float = dataclasses.field(metadata={"static": True})
    query_lens: jax.Array | None = None
    layer: jax.Array | int | None = None
    kv_lora_rank: int = dataclasses.field(default=RANK, metadata={"static": True})
    kv_scale: jax.Array | None = None
    schedule: Schedule | None = None
    arena: Arena | None = None
    merge: ContextParallelMerge | None = None

    @property
    def given(self) -> tuple[int, int, int]:
        """(B, S, H) of q, including heads that only fill a tile."""
        batch, q_len, heads, _ = (self.q[0] if isinstance(self.q, tuple) else self.q).shape
        return batch, q_len, heads

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, S, H) without heads that only fill a tile."""
        batch, q_len, heads = self.given
        return batch, q_len, (self.merge and self.merge.heads) or heads

    @property
    def batch(self) -> int:
        return self.shape[0]

    @property
    def q_len(self) -> int:
        return self.shape[1]

    @property
    def num_heads(self) -> int:
        return self.shape[2]

    @property
    def head_dim(self) -> int:
        """D, the dims of a query head."""
        return sum(x.shape[-1] for x in (self.q if isinstance(self.q, tuple) else (self.q,)))

    @property
    def dtype(self) -> Any:
        return (self.q[0] if isinstance(self.q, tuple) else self.q).dtype

    @property
    def page_size(self) -> int:
        return self.kv_cache.shape[-2]

    @property
    def max_pages(self) -> int:
        return self.block_tables.shape[1]

    @property
    def format(self) -> LatentFormat:
        rope = self.head_dim - self.kv_lora_rank
        return LatentFormat(self.kv_cache.dtype, self.kv_lora_rank, rope)

    @property
    def rope(self) -> bool:
        """Whether a latent has rotated dims after its R dims."""
        return self.head_dim > self.kv_lora_rank

    def joined(self) -> "MlaDecodeCall":
        """Returns the same call with q in one array, without heads that only fill a tile."""
        q = jnp.concatenate(self.q, axis=-1) if isinstance(self.q, tuple) else self.q
        return dataclasses.replace(self, q=q if self.merge is None else q[:, :, : self.num_heads])

    def stacked(self) -> "MlaDecodeCall":
        """Returns the same call on a stack of layers; none of its operands has a gradient."""
        q, kv_cache, kv_scale = without_gradient(
            "mla_decode",
            (self.q, self.kv_cache, self.kv_scale),
            "q kv_cache kv_scale",
            train_with="causal_attention",
        )
        layer = self.layer
        if layer is None:
            kv_cache, layer = kv_cache[None], 0
        layer = jnp.asarray(layer, jnp.int32).reshape(1)
        return dataclasses.replace(self, q=q, kv_cache=kv_cache, kv_scale=kv_scale, layer=layer)

    def inputs(self) -> dict[str, Any]:
        """The inputs of a launch except the queries, once the call has layers and a schedule."""
        assert self.schedule is not None
        return {
            "kv_ref": self.kv_cache,
            "layer_ref": self.layer,
            "table_ref": self.block_tables,
            "lens_ref": self.seq_lens,
            "scheduled_lens_ref": self.schedule.seq_lens,
            "cuts_ref": self.schedule.cuts,
            "order_ref": self.schedule.order,
            "kv_scale_ref": None if self.kv_scale is None else self.kv_scale.reshape(1),
            "query_lens_ref": self.query_lens,
        }
