"""What the hybrid decoder's steps carry and are given, and the bytes of it from shapes alone."""

import dataclasses
import operator
from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxattn import gdn, mla
from jaxattn.arena import Arena, ArenaSpec
from jaxattn.core.formats import PAGE_SIZE
from jaxattn.models.config import HybridConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """What a step carries, all of it donated and updated in place.

    Attributes:
        arena: scratch, see `scratch`.
        kv_cache: [L_mla, N, C, Ds], the pages of latents, in the config's `latent_format`.
        conv_state: [L_gdn, Z, W - 1, Dc], the last inputs of each convolution.
        ssm_state: float32 [L_gdn, Z, Hv, Dv, Dk].
    """

    arena: Arena
    kv_cache: Num[Array, "L N C Ds"]
    conv_state: Float[Array, "L Z W-1 Dc"]
    ssm_state: Float[Array, "L Z Hv Dv Dk"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """One new token a row.

    Attributes:
        tokens: int32 [B, S], S = 1 unless several tokens are known.
        seq_lens: int32 [B], the new tokens included; 0 is a padding row.
        block_tables: int32 [B, M], pages of the row in order; entries past its length are never
            read.
        state_indices: int32 [B], the row's state slot; -1 is a padding row.
    """

    tokens: Int[Array, "B S"]
    seq_lens: Int[Array, "B"]
    block_tables: Int[Array, "B M"]
    state_indices: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """A chunk of each row's prompt, left-aligned in T tokens.

    Attributes:
        tokens: int32 [B, T].
        query_lens: int32 [B], tokens of the chunk; 0 is a padding row.
        seq_lens: int32 [B], the row's length after the chunk. A row whose `seq_lens` equals its
            `query_lens` is fresh: it starts from zero states, whatever its slot holds.
        block_tables: int32 [B, M].
        state_indices: int32 [B]; -1 is a padding row.
    """

    tokens: Int[Array, "B T"]
    query_lens: Int[Array, "B"]
    seq_lens: Int[Array, "B"]
    block_tables: Int[Array, "B M"]
    state_indices: Int[Array, "B"]


def op_scratch(
    config: HybridConfig,
    batch: int,
    *,
    max_pages: int,
    q_len: int = 1,
    page_size: int = PAGE_SIZE,
) -> tuple[ArenaSpec, ...]:
    """The scratch of each op of a decode step of `batch` rows of up to `max_pages` pages."""
    attention = mla.scratch(
        batch=batch,
        q_len=q_len,
        num_heads=config.num_attention_heads,
        kv_lora_rank=config.kv_lora_rank,
        dtype=config.compute_dtype,
        max_pages=max_pages,
        page_size=page_size,
    )
    delta_rule = gdn.scratch(
        batch=batch,
        q_len=q_len,
        num_v_heads=config.linear_num_value_heads,
        head_v_dim=config.linear_value_head_dim,
        dtype=config.compute_dtype,
    )
    return attention, delta_rule


def scratch(
    config: HybridConfig,
    batch: int,
    *,
    max_pages: int,
    q_len: int = 1,
    page_size: int = PAGE_SIZE,
) -> ArenaSpec:
    """What one decode step needs, however many layers the model has: the ops' scratch, overlaid."""
    specs = op_scratch(config, batch, max_pages=max_pages, q_len=q_len, page_size=page_size)
    return reduce(operator.or_, specs, ArenaSpec())


def init_state(
    config: HybridConfig,
    batch: int,
    num_pages: int,
    num_slots: int,
    *,
    max_pages: int,
    q_len: int = 1,
    page_size: int = PAGE_SIZE,
    spec: ArenaSpec | None = None,
) -> DecodeState:
    """Zeroed caches and states, and an arena for `batch` rows of `q_len` tokens, `max_pages` pages.

    Under `jax.eval_shape` it says the bytes without a device. `spec`, if given, is the arena's:
    for steps of several batch sizes.
    """
    dtype = config.compute_dtype
    gdn_layers, heads = config.num_gdn_layers, config.linear_num_value_heads
    taps = config.linear_conv_kernel_dim - 1
    head = (config.linear_value_head_dim, config.linear_key_head_dim)
    latents = config.latent_format
    kv_cache = (config.num_mla_layers, num_pages, page_size, latents.width)
    if spec is None:
        spec = scratch(config, batch, max_pages=max_pages, q_len=q_len, page_size=page_size)
    return DecodeState(
        arena=Arena.allocate(spec),
        kv_cache=jnp.zeros(kv_cache, latents.dtype),
        conv_state=jnp.zeros((gdn_layers, num_slots, taps, config.conv_dim), dtype),
        ssm_state=jnp.zeros((gdn_layers, num_slots, heads, *head), jnp.float32),
    )
