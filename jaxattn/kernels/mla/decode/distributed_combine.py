"""Combines the partial results of few rows over several GPUs, in one launch over peer memory.

Each GPU has attended with all heads to its own pages of a row, and owns some of the heads. A CTA
merges its GPU's partial results of half a head's output, and sends them with their log-sum-exp to
the GPU that owns the head. There the CTA of the same half head waits for the pieces of all GPUs and
writes the merged output. A layer thus takes one launch instead of seven for merging, packing,
sending and merging again.

`kernels/collectives/peer_transfer.py` describes the inboxes and why they lose nothing. A GPU sends
each half of a head to one GPU only, so each CTA has a counter of its own. Every GPU owns heads, so
each launch receives from all GPUs, and no GPU overwrites data that has not been read. CTAs that
wait for one place are neighbors, and all CTAs before them send first.

Limits: heads that divide over 2 to 8 GPUs, which are all of the mesh, in one process; rows that may
be split. Reference: `jaxattn.mla.mla_decode_context_parallel` (implementation="xla"); tests:
tests/parallel/test_gpus_context_parallel_decode.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.symmetric_buffer import SymmetricBuffer
from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.attention.softmax_constants import LOG2E
from jaxattn.kernels.attention.split_kv_schedule import Schedule
from jaxattn.kernels.collectives import peer_transfer as peers
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.mla.decode.arguments import ContextParallelMerge, MlaDecodeCall
from jaxattn.kernels.mla.decode.combine import (
    CombineReduction,
    SplitRows,
    broadcast_scalar,
    merge_into,
    weight_of,
)
from jaxattn.kernels.mla.decode.latent_tile import RANK

HALVES = RANK // peers.STATE_DIMS
SHARERS = 4  # warpgroups that share the partial results of a CTA
AHEAD = 17  # partial results that each reads at a time: two turns for those of 132 CTAs
LAYOUT = peers.STATE


def mailbox_shape(rows: int, heads: int) -> tuple[int, int]:
    """The (tokens, features) of the mailbox for `rows` rows of the heads of all GPUs."""
    return rows * heads * HALVES, peers.NUMBERS * peers.STATE_DIMS


def distributed_combine(
    call: MlaDecodeCall, split: SplitRows, merge: ContextParallelMerge
) -> tuple[jax.Array, SymmetricBuffer]:
    """Returns (out [B, heads / N, 512] of this GPU's heads, the mailbox).

    The call's heads are its first packed rows, and GPU n owns the n-th part of them.
    """
    op, box, heads = "mla_decode", merge.mailbox, call.num_heads
    inbox, lse = box.inbox, split.lse
    peers.check(op, inbox, merge.axes, interpret=False)
    (batch, rows), gpus = lse.shape, inbox.shape[1]
    tokens, features = mailbox_shape(batch, heads)
    if heads % gpus or inbox.shape[2] < tokens or inbox.shape[3] != features:
        raise Refusal(
            f"{op}: to combine {batch} rows, the GPUs must divide the {heads} heads, and the "
            f"mailbox must have at least {tokens} tokens of {features} features; got {gpus} GPUs "
            f"and {inbox.shape}"
        )
    own = heads // gpus
    out_ref, partial_ref = split.refs
    first_rows = split.first_rows  # the body captures no array, so that launches share its trace
    if out_ref.dtype != jnp.bfloat16:
        raise Refusal(
            f"{op}: the kernel combines outputs of several GPUs only in bfloat16, got "
            f"{out_ref.dtype.name}"
        )
    inbox_ref, counts_ref = jax.new_ref(inbox), jax.new_ref(box.counts)

    def body(sums, tops, totals, barrier, inbox_ref, counts_ref, addresses_ref, **refs) -> None:
        row, head, half, gpu = (lax.axis_index(x) for x in ("row", "head", "half", "gpu"))
        place = (row * own + head) * HALVES + half
        call = peers.PeerTransfer(
            inbox_ref, counts_ref, addresses_ref, place, features, place * gpus + gpu
        )
        to, known = call.address(gpu), call.address(call.own)  # there by the time of the state
        sharers = CombineReduction(SHARERS, sums, tops, totals, barrier)
        block = DistributedCombineCta(first_rows, rows, sharers, **refs)
        out, lse = block.state(row, gpu * own + head, half)

        @pl.when(lax.axis_index("wg") == 0)
        def _():
            call.send_state(to, known, out, lse)

            @pl.when(gpu == call.own)
            def _():
                block.write(row, head, half, call.receive_states())

            call.end()

    out: dict[str, Any] = launch(
        body,
        name="mla_decode_meet",
        grid={"row": batch, "head": own, "half": HALVES, "gpu": gpus},
        inputs=split.slots(call)
        | {
            "alone": out_ref,
            "partial": partial_ref,
            "lse": lse,
            "addresses_ref": box.addresses,
            "inbox_ref": inbox_ref,
            "counts_ref": counts_ref,
        },
        outputs={"out": jax.ShapeDtypeStruct((batch, own, RANK), jnp.bfloat16)},
        scratch=exchange_smem(),
        warpgroups=SHARERS,
        compiler_params=peers.COMPILER,
    )
    after = SymmetricBuffer(jax.freeze(inbox_ref), jax.freeze(counts_ref), box.addresses)
    return out["out"], after


def exchange_smem() -> dict[str, Any]:
    """The shared memory through which the warpgroups of a CTA exchange their sums."""
    return {
        "sums": plgpu.SMEM((SHARERS, peers.STATE_DIMS), jnp.float32),
        "tops": plgpu.SMEM((SHARERS,), jnp.float32),
        "totals": plgpu.SMEM((SHARERS,), jnp.float32),
        "barrier": plgpu.Barrier(num_arrivals=SHARERS),
    }


class DistributedCombineCta:
    """A CTA that combines half a head of a row."""

    def __init__(
        self,
        first_rows: list[int],
        rows: int,
        sharers: CombineReduction,
        *,
        partial_lse: Any,
        slots: Any,
        lens: Any,
        scheduled_lens: Any,
        alone: Any,
        partial: Any,
        lse: Any,
        out: Any,
    ):
        self.first_rows, self.rows, self.sharers = first_rows, rows, sharers
        self.partial_lse, self.slots, self.lens, self.scheduled_lens = (
            partial_lse,
            slots,
            lens,
            scheduled_lens,
        )
        self.alone, self.partial, self.lse, self.out = alone, partial, lse, out

    def state(self, row: Any, head: Any, half: Any) -> tuple[jax.Array, jax.Array]:
        """This GPU's output and log-sum-exp of the half head."""
        slots = [self.slots[i, row] for i in range(3)]
        number = slots[1]
        if self.scheduled_lens is not None:
            number = jnp.where(self.lens[row] == self.scheduled_lens[row], number, 0)
        dims = pl.ds(half * peers.STATE_DIMS, peers.STATE_DIMS)
        # A row that was not split is already whole.
        at = self.first_rows[0] + row * self.rows + head
        whole = plgpu.load(self.alone.at[at, dims], layout=LAYOUT, optimized=False)
        whole_lse = self.lse[row, head]

        wg = lax.axis_index("wg")

        def add(j: jax.Array, state: Any) -> Any:
            numbers = [(j * SHARERS + wg) * AHEAD + k for k in range(AHEAD)]
            slots_of = [Schedule.slot_of(slots, jnp.minimum(k, number - 1)) for k in numbers]
            rows = [self.first_rows[1] + slot * self.rows + head for slot in slots_of]
            lses = [
                jnp.where(k < number, self.partial_lse[slot, head], -jnp.inf)
                for k, slot in zip(numbers, slots_of, strict=True)
            ]
            pieces = [
                plgpu.load(self.partial.at[at, dims], layout=LAYOUT, optimized=False) for at in rows
            ]
            return merge_into(state, lses, pieces)

        nothing = jnp.float32(0)
        empty = (jnp.float32(-jnp.inf), nothing, _full(nothing))
        steps = lax.div(number + SHARERS * AHEAD - 1, SHARERS * AHEAD)
        state = lax.fori_loop(0, steps, add, empty)
        top, total, out = self.sharers.gathered(wg, state)
        empty = top == -jnp.inf
        out = out * _full(jnp.where(empty, 0.0, 1 / total))
        lse = jnp.where(empty, -jnp.inf, top + jnp.log2(total) * (1 / LOG2E))
        cut = number > 0
        return jnp.where(_full(cut), out, whole.astype(jnp.float32)), jnp.where(cut, lse, whole_lse)

    def write(self, row: Any, head: Any, half: Any, states: list[tuple[Any, Any]]) -> None:
        """Writes the output that the pieces of all GPUs make."""
        top = functools.reduce(jnp.maximum, [lse for _, lse in states])
        weights = [weight_of(lse, top) for _, lse in states]
        total = functools.reduce(jnp.add, weights)
        out = functools.reduce(
            jnp.add, [_full(w) * piece for w, (piece, _) in zip(weights, states, strict=True)]
        )
        out = out * _full(jnp.where(top == -jnp.inf, 0.0, 1 / total))
        dims = pl.ds(half * peers.STATE_DIMS, peers.STATE_DIMS)
        self.out.at[row, head, dims][...] = out.astype(jnp.bfloat16)


def _full(value: Any) -> jax.Array:
    return broadcast_scalar(value, peers.STATE_DIMS)
