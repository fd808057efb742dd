"""The schedule of MLA decode: the division of a step's rows among the CTAs."""

import dataclasses

import jax

from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import check_sizes
from jaxattn.core.validation.varying_axes import refuse_explicit_axes
from jaxattn.kernels.attention.split_kv_schedule import (
    PAGE,
    Schedule,
    compute_max_pieces,
    make_schedule,
    merge_cost,
    num_parts,
    num_steps,
    row_cost,
    split_thresholds,
)
from jaxattn.kernels.hopper.device import NUM_SMS
from jaxattn.kernels.mla.decode.arguments import MlaDecodeCall

PAGE_SIZES = (16, 32, 64, 128)
INTERPRETED_SMS = 4  # the interpreter takes seconds per CTA, with or without work


def decode_schedule(
    seq_lens: jax.Array,
    *,
    q_len: int,
    num_heads: int,
    max_pages: int,
    page_size: int = PAGE,
    batch_invariant: bool = False,
    interpret: bool = False,
) -> Schedule:
    """Returns the schedule that divides the rows of a step among the GPU's CTAs. Compute it once
    per step, for all layers.

    Args:
        seq_lens: int32 [B], as for `mla_decode`: traced lengths beyond M * C are padding here too.
        q_len: S.
        num_heads: H.
        max_pages: M, the width of the block tables.
        page_size: C, the tokens of a page. The kernels support 16, 32, 64 and 128. With other page
            sizes, `mla_decode` runs in XLA, which does not use the schedule.
        batch_invariant: Whether a row's result has the same bits with any other rows. Only B, M and
            the row's own length then determine how the row is split. Each row gets the same number
            of CTAs, also if it is longer than the other rows. With more rows than CTAs, no row is
            split.
        interpret: Whether the schedule is for the interpreter, which has fewer CTAs.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype, shape or size; the message names the
            argument.
    """
    arguments = OpArguments("mla.decode_schedule")
    sizes = {"max_pages": max_pages, "page_size": page_size}
    check_sizes(arguments.op, q_len=q_len, num_heads=num_heads, **sizes)
    seq_lens = arguments.check_scheduled(seq_lens, max_pages, page_size)
    refuse_explicit_axes(arguments.op, seq_lens)
    num_sms = INTERPRETED_SMS if interpret else NUM_SMS
    batch, steps = seq_lens.shape[0], num_steps(max_pages, page_size)
    parts = num_parts(batch, q_len, num_heads, steps, num_sms)
    schedule = make_schedule(
        seq_lens,
        parts=parts,
        max_pages=steps,
        row_cost=row_cost(q_len, num_heads),
        merge_cost=merge_cost(q_len, num_heads),
        pieces=compute_max_pieces(batch, parts) if batch_invariant else 0,
        thresholds=split_thresholds(batch, q_len, num_heads),
    )
    return dataclasses.replace(schedule, seq_lens=seq_lens)


def scheduled(call: MlaDecodeCall, *, interpret: bool) -> MlaDecodeCall:
    """Returns the call with its schedule, or with one made from its own lengths."""
    if call.schedule is not None:
        return call
    schedule = decode_schedule(
        call.seq_lens,
        q_len=call.q_len,
        num_heads=call.num_heads,
        max_pages=call.max_pages,
        page_size=call.page_size,
        interpret=interpret,
    )
    return dataclasses.replace(call, schedule=dataclasses.replace(schedule, seq_lens=None))
