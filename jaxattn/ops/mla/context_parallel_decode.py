"""Context-parallel MLA decode: each GPU holds some pages of a row, and the last launch merges."""

from typing import Any

from jaxtyping import Array, Float, Int, Num

from jaxattn.arena import Arena
from jaxattn.core.cache.symmetric_buffer import SymmetricBuffer
from jaxattn.core.deprecation import warn_renamed
from jaxattn.core.dispatch import Implementation
from jaxattn.kernels.attention.split_kv_schedule import Schedule
from jaxattn.kernels.mla.decode.arguments import ContextParallelMerge
from jaxattn.ops.mla.decode import attend, checked_call


def mla_decode_context_parallel(
    q: Float[Array, "B 1 H D"] | tuple[Float[Array, "B 1 H R"], Float[Array, "B 1 H P"]],
    kv_cache: Num[Array, "L N C Ds"] | Num[Array, "N C Ds"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    scale: float,
    merge: ContextParallelMerge,
    layer: Array | int | None = None,
    kv_lora_rank: int = 512,
    kv_scale: Array | float | None = None,
    schedule: Schedule | None = None,
    arena: Arena | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B 1 h R"], Arena | None, SymmetricBuffer]:
    """Runs `mla_decode` for one token per row on N GPUs that hold different pages of the row.

    Call it inside `jax.shard_map`. Each GPU attends with all heads to its own pages, and receives
    the output of its own h = H / N heads over all GPUs' pages: `merge_attention_states` of the
    GPUs' outputs, which are first rounded to bfloat16. A row without tokens gives 0.

    Args:
        q: Queries as for `mla_decode`, of all GPUs' heads and the same on all GPUs; GPU n owns the
            n-th part. For padding heads see `ContextParallelMerge.heads`.
        seq_lens: int32 number of tokens of each row in this GPU's pages.
        merge: The axes and the mailbox of the merge. The kernel supports up to 256 heads, counted
            over all rows; see `merge_buffer_shape`.

    Other arguments and errors are those of `mla_decode`.

    Returns:
        (The output of this GPU's heads, in q's dtype; the arena, or None; the mailbox.)
    """
    call = checked_call(
        q,
        kv_cache,
        block_tables,
        seq_lens,
        scale=scale,
        layer=layer,
        kv_lora_rank=kv_lora_rank,
        kv_scale=kv_scale,
        schedule=schedule,
        arena=arena,
        merge=merge,
    )
    out, after, mailbox = attend(call, implementation)
    return out, after, mailbox


def mla_decode_met(*args: Any, meeting: ContextParallelMerge, **kwargs: Any) -> tuple[Any, ...]:
    """Deprecated name of `mla_decode_context_parallel`, whose argument `merge` was `meeting`."""
    warn_renamed("jaxattn.mla.mla_decode_met", "jaxattn.mla.mla_decode_context_parallel")
    return mla_decode_context_parallel(*args, merge=meeting, **kwargs)
