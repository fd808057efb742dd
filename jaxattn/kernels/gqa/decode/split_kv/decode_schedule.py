"""The schedule of `gqa_decode`: the division of the steps of all (row, KV head) pairs into parts.

The division is that of mla_decode, with pairs instead of rows; work_iterator.py describes how
steps are counted.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import check_sizes, check_window
from jaxattn.core.validation.varying_axes import refuse_explicit_axes
from jaxattn.kernels.attention.split_kv_schedule import (
    MIN_PART,
    PAGE,
    Schedule,
    SplitThresholds,
    compute_max_pieces,
    make_schedule,
    may_split,
    num_steps,
)
from jaxattn.kernels.gqa.decode.smem import block_columns, ctas_per_sm
from jaxattn.kernels.gqa.decode.split_kv.oversubscription import (
    OversubscribedSchedule,
    may_oversubscribe,
    oversubscribe,
)
from jaxattn.kernels.gqa.decode.split_kv.semaphore import zero_counts
from jaxattn.kernels.gqa.decode.split_kv.work_iterator import first_step
from jaxattn.kernels.hopper.device import NUM_SMS

INTERPRETED_SMS = 4  # the interpreter takes seconds per CTA, with or without work
# The cost of a pair beyond its steps, in steps: the exchange of two outputs and the store, while
# the producer goes on. And the cost of partial results and their combine.
PAIR_COST, MERGE_COST = 2, 6
# Slightly fewer multiprocessors read as fast as all of them: parts of one piece are used if they
# are longer by at most one part in this.
LONGER = 40
# The least steps of a part that pays for its partial results; and, if few are merged, one step for
# each of two warpgroups.
LEAST_PART, SHORT_PART = 4, 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairSchedule:
    """The division of pairs of a row and a key-value head among the GPU's CTAs, from
    `decode_schedule`.

    Attributes:
        line: The schedule of the pairs in the order row * Hk + head, with pairs instead of rows.
        arrived: uint32 zeros [pairs * tiles], which the calls with this schedule use as
            `SplitSemaphore.counts`, one call after another. None: each call creates its own
            counters.
        seq_lens: int32 [B], the lengths of the schedule, with 0 for lengths that were too long. A
            call returns NaN for a row with another length. None: the schedule is of the call's own
            lengths.
        num_kv_heads: Hk.
        q_len: S.
        window: The number of keys that a token sees, or None.
        fine: A second `line` with more parts than the GPU runs at a time, for a kernel that is
            bound by memory. None: there are too few pairs.
        batch_invariant: Whether the bits of a pair's result do not depend on the earlier pairs of
            its part.
    """

    line: Schedule
    num_kv_heads: int = dataclasses.field(metadata={"static": True})
    q_len: int = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})
    arrived: jax.Array | None = None
    seq_lens: jax.Array | None = None
    fine: OversubscribedSchedule | None = None
    batch_invariant: bool = dataclasses.field(default=False, metadata={"static": True})

    def arrived_of(self, tiles: int) -> jax.Array:
        """Returns `arrived`, or zeros if it is None, for `tiles` tiles per pair.

        Raises:
            ValueError: It was made for another number of tiles.
        """
        if self.arrived is None:
            return zero_counts(jnp.repeat(self.line.slots[1], tiles))
        if len(self.arrived) != self.line.slots.shape[-1] * tiles:
            raise ValueError(
                f"gqa_decode: schedule counts the arrivals of {len(self.arrived)} tiles, but this "
                f"call has {self.line.slots.shape[-1] * tiles}; create it with gqa.decode_schedule "
                "from this call's num_heads and head_dim"
            )
        return self.arrived

    def check(
        self, op: str, *, batch: int, q_len: int, num_kv_heads: int, window: int | None, steps: int
    ) -> None:
        """Raises ValueError if the schedule is for other rows."""
        made = {
            "B": self.line.slots.shape[-1] // self.num_kv_heads,
            "S": self.q_len,
            "Hk": self.num_kv_heads,
            "window": self.window,
            f"steps of {PAGE} tokens": self.line.max_pages or steps,
        }
        asked = [batch, q_len, num_kv_heads, window, steps]
        for (name, has), wanted in zip(made.items(), asked, strict=True):
            if has != wanted:
                raise ValueError(
                    f"{op}: schedule is for {name} = {has}, but this call has {wanted}; create it "
                    "with gqa.decode_schedule from this call's lengths, shapes and window"
                )


def check_groups(op: str, num_heads: int, num_kv_heads: int) -> None:
    """Raises ValueError unless all KV heads have the same number of query heads."""
    if num_heads % num_kv_heads:
        raise ValueError(f"{op}: {num_heads=} must be a multiple of {num_kv_heads=}")


def compute_max_steps(max_pages: int, page_size: int, q_len: int, window: int | None) -> int:
    """Returns the most steps of a row, from static shapes."""
    steps = num_steps(max_pages, page_size)
    if window is None:
        return steps
    # This many consecutive tokens, which may begin at the last token of a step.
    return min(steps, -(-(q_len + window - 2) // PAGE) + 1)


def num_parts(
    pairs: int, steps: int, *, columns: int, tiles: int, head_dim: int, num_sms: int
) -> int:
    """Returns the parts of a call, from static shapes: as many as the GPU runs CTAs at a time for
    each tile, or fewer if the pairs do not pay for them."""
    blocks = num_sms * ctas_per_sm(columns, head_dim, steps)
    return max(1, min(blocks // tiles, pairs * (steps + PAIR_COST) // SHORT_PART))


def may_cut(pairs: int, parts: int, steps: int) -> bool:
    """Whether pairs of up to `steps` steps are split at all, from static shapes; with 0 steps,
    which means unknown, they may be. A window's few steps are not split: no second launch is needed
    to merge."""
    return may_split(pairs, parts) and not 0 < steps < 2 * MIN_PART


def decode_schedule(
    seq_lens: jax.Array,
    *,
    q_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_pages: int,
    page_size: int,
    window: int | None = None,
    batch_invariant: bool = False,
    interpret: bool = False,
) -> PairSchedule:
    """Returns the schedule that divides the pairs of a step among the GPU's CTAs. Compute it once
    per step, for all layers of these shapes.

    Args:
        seq_lens: int32 [B], as for `gqa_decode`: lengths beyond M * C are padding here too.
        q_len: S.
        num_heads: H.
        num_kv_heads: Hk.
        head_dim: D.
        max_pages: M, the width of the block tables.
        page_size: C, the tokens of a page. The kernel supports 16, 32, 64 and 128.
        window: The number of keys that a token sees. Layers with another window need another
            schedule.
        batch_invariant: Whether a row's result has the same bits with any other rows. Only B, M and
            the row's own length then determine how a pair is split.
        interpret: Whether the schedule is for the interpreter, which has fewer CTAs.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype, shape or size; the message names the
            argument.
    """
    arguments = OpArguments("gqa.decode_schedule")
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    pages = {"max_pages": max_pages, "page_size": page_size}
    check_sizes(arguments.op, q_len=q_len, **heads, **pages)
    check_groups(arguments.op, num_heads, num_kv_heads)
    window = check_window(arguments.op, window)
    if not isinstance(batch_invariant, bool):
        raise TypeError(
            f"{arguments.op}: batch_invariant must be True or False, got {batch_invariant!r}"
        )
    seq_lens = arguments.check_scheduled(seq_lens, max_pages, page_size)
    refuse_explicit_axes(arguments.op, seq_lens)
    steps = compute_max_steps(max_pages, page_size, q_len, window)
    columns, tiles = block_columns(q_len * (num_heads // num_kv_heads), head_dim)
    pairs = seq_lens.shape[0] * num_kv_heads
    parts = num_parts(
        pairs, steps, columns=columns, tiles=tiles, head_dim=head_dim,
        num_sms=INTERPRETED_SMS if interpret else NUM_SMS,
    )  # fmt: skip
    pieces = compute_max_pieces(pairs, parts) if batch_invariant else 0
    split = may_cut(pairs, parts, steps)
    lens = jnp.repeat(seq_lens - first_step(seq_lens, q_len, window) * PAGE, num_kv_heads)
    line = make_schedule(
        lens,
        parts=parts,
        max_pages=steps,
        row_cost=PAIR_COST,
        merge_cost=MERGE_COST,
        pieces=pieces if split else 1,
        thresholds=SplitThresholds(part=LEAST_PART, short=SHORT_PART),
        min_piece=SHORT_PART,
        excess_divisor=LONGER,
    )
    fine = None
    if may_oversubscribe(pairs, parts, steps):
        each = jnp.clip((lens + PAGE - 1) // PAGE, 0, steps)
        fine = oversubscribe(line, each, cost=PAIR_COST, cut=split and not batch_invariant)
    schedule = PairSchedule(
        line, num_kv_heads, q_len, window, seq_lens=seq_lens, fine=fine,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    return dataclasses.replace(schedule, arrived=schedule.arrived_of(tiles)) if split else schedule
