"""MLA decode of GPUs with a part of each row's pages: their outputs meet in its last launch."""

from jaxtyping import Array, Float, Int, Num

from jaxattn.arena import Arena
from jaxattn.core.cache.symmetric_memory import SymmetricBuffer
from jaxattn.core.dispatch import Implementation
from jaxattn.kernels.attention.tile_scheduler import Schedule
from jaxattn.kernels.mla.decode.call import Meeting
from jaxattn.ops.mla.decode import attend, checked_call


def mla_decode_met(
    q: Float[Array, "B 1 H D"] | tuple[Float[Array, "B 1 H R"], Float[Array, "B 1 H P"]],
    kv_cache: Num[Array, "L N C Ds"] | Num[Array, "N C Ds"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    scale: float,
    meeting: Meeting,
    layer: Array | int | None = None,
    kv_lora_rank: int = 512,
    kv_scale: Array | float | None = None,
    schedule: Schedule | None = None,
    arena: Arena | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B 1 h R"], Arena | None, SymmetricBuffer]:
    """`mla_decode` of one token of each row, by N GPUs with some of its pages each.

    It is called inside of `jax.shard_map`. Each GPU attends with all heads to its own pages, and is
    given the output of its own h = H / N heads over the pages of all: what `merge_attention_states`
    makes of the GPUs' outputs, which are rounded to bfloat16 before. A row without tokens is 0.

    Args:
        q: as for `mla_decode`, of all GPUs' heads, GPU n's the n-th part; or of more heads, see
            `Meeting.heads`. The same on all GPUs.
        seq_lens: int32 tokens of each row in this GPU's pages.
        meeting: with what they meet. The kernel has a row of up to 256 heads, or as many rows as
            have so many together, which `meeting_room` says.

    Other arguments and errors are those of `mla_decode`.

    Returns:
        (the output of this GPU's heads, in q's dtype; the arena, or None; the mailbox).
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
        meeting=meeting,
    )
    out, after, mailbox = attend(call, implementation)
    return out, after, mailbox
