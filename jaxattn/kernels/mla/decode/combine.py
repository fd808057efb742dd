"""The split-KV combine of `mla_decode`: merges partial results into the rows of the output.

Each CTA merges some packed rows of one request. `mla_decode` has already written a request that
lies in one part as a whole, and the CTAs of such a request exit at once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.softmax_constants import LOG2E
from jaxattn.kernels.attention.split_kv_schedule import Schedule
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS
from jaxattn.kernels.hopper.store.row_store import store
from jaxattn.kernels.mla.decode.arguments import MlaDecodeCall
from jaxattn.kernels.mla.decode.latent_tile import RANK

AHEAD = 8  # partial results of a row that are read at a time
# Most split rows have two partial results. With at most FEW of them, a CTA merges four rows
# concurrently, which share AHEAD; with more, two rows, each with AHEAD of its own.
FEW, FEW_BESIDE, MANY_BESIDE = 8, 4, 2
# CTAs without work cost more the more there are; CTAs with work cost more the longer they are.
BLOCKS, LONGEST = 512, 16
# With at most SHARED_ROWS rows, each has many partial results, and several warpgroups share it. A
# multiprocessor's registers have room for one CTA of SHARERS warpgroups; where such CTAs would need
# several waves, a row has FEWER_SHARERS.
SHARED_ROWS, SHARERS, FEWER_SHARERS = 256, 4, 2


@dataclasses.dataclass(frozen=True, eq=False)
class SplitRows:
    """The results of a launch in which rows may be split.

    Attributes:
        refs: The output rows [.., 512] and the float32 partial results [.., 512].
        first_rows: Where in each of the refs the op's own rows begin.
        lse: float32 [B, rows], the LSE of the rows that were not split.
        partial_lse: float32 [2 * parts, rows], natural logarithm.
    """

    refs: list[Any]
    first_rows: list[int]
    lse: jax.Array
    partial_lse: jax.Array

    def slots(self, call: MlaDecodeCall) -> dict[str, Any]:
        """The inputs that tell the combine launch where each row's partial results are, and which
        rows the schedule knows with another length. The combine leaves the latter as they are."""
        assert call.schedule is not None
        return {
            "partial_lse": self.partial_lse,
            "slots": call.schedule.slots,
            "lens": None if call.schedule.seq_lens is None else call.seq_lens,
            "scheduled_lens": call.schedule.seq_lens,
        }


def combine(
    call: MlaDecodeCall,
    split: SplitRows,
    *,
    sinks: jax.Array | None = None,
    sharers: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Writes the merged rows to the output and returns their LSE.

    Args:
        sinks: float32 [rows], a logit without a value for each packed row.
        sharers: Warpgroups that share the partial results of a row. None: four or two if there are
            few rows with more pieces than one warpgroup reads at a time, otherwise one; in the
            interpreter always one.
    """
    batch, rows = split.lse.shape
    used = -(-call.q_len * call.num_heads // 8) * 8
    if sharers is None:
        sharers = 1 if interpret else _sharers(batch, used, len(split.partial_lse) // 2)
    chunk = _rows_of_a_block(batch, used) if sharers == 1 else 1
    out_ref, partial_ref = split.refs
    first_rows = split.first_rows  # the body captures no array, so that launches share its trace
    lse_ref = jax.new_ref(split.lse)
    shared = {
        "sums": plgpu.SMEM((sharers, RANK), jnp.float32),
        "tops": plgpu.SMEM((sharers,), jnp.float32),
        "totals": plgpu.SMEM((sharers,), jnp.float32),
        "barrier": plgpu.Barrier(num_arrivals=sharers),
    }

    def body(sums, tops, totals, barrier, **refs):
        reduction = CombineReduction(sharers, sums, tops, totals, barrier) if sharers > 1 else None
        MlaCombineCta(first_rows, rows, chunk, reduction, **refs).run()

    launch(
        body,
        name="mla_decode_combine",
        grid={"row": batch, "chunk": used // chunk},
        inputs=split.slots(call)
        | {"sinks": sinks, "out": out_ref, "partial": partial_ref, "lse": lse_ref},
        scratch=shared if sharers > 1 else dict.fromkeys(shared),
        warpgroups=sharers,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return jax.freeze(lse_ref)


def _sharers(batch: int, used: int, parts: int) -> int:
    if parts <= AHEAD * batch or batch * used > SHARED_ROWS:  # average pieces of a row
        return 1
    return SHARERS if batch * used <= NUM_SMS else FEWER_SHARERS


def _rows_of_a_block(batch: int, used: int) -> int:
    """The rows per CTA if one warpgroup merges a row. With several warpgroups a CTA merges one row
    and exits: none waits for the others to have read its sum, which a second row would overwrite.
    """
    chunk = 1
    while chunk < LONGEST and used % (2 * chunk) == 0 and batch * used // (2 * chunk) >= BLOCKS:
        chunk *= 2
    return chunk


def _layout_of(dims: int) -> Any:
    return plgpu.Layout.WG_STRIDED((dims,), vec_size=dims // 128)


def broadcast_scalar(value: Any, dims: int = RANK) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(value, (dims,), []), _layout_of(dims))


def weight_of(lse: jax.Array, top: jax.Array) -> jax.Array:
    """Returns exp(lse - top), or 0 where no key was seen."""
    return jnp.exp2((lse - jnp.where(top == -jnp.inf, 0.0, top)) * LOG2E)


def merge_into(state: Any, lses: list[jax.Array], pieces: list[jax.Array]) -> Any:
    """Adds pieces to the sums of weights and of weighted pieces, relative to the greatest LSE so
    far."""
    top, total, out = state
    new_top, dims = functools.reduce(jnp.maximum, lses, top), len(out)
    rescale = weight_of(top, new_top)
    total, out = total * rescale, out * broadcast_scalar(rescale, dims)
    for lse, piece in zip(lses, pieces, strict=True):
        weight = weight_of(lse, new_top)
        total += weight
        out += broadcast_scalar(weight, dims) * piece
    return new_top, total, out


@dataclasses.dataclass(frozen=True)
class CombineReduction:
    """The exchange between the `count` warpgroups that share a row's partial results.

    Attributes:
        sums: float32 [count, dims]; tops, totals: float32 [count].
        barrier: The barrier at which all of them arrive.
    """

    count: int
    sums: Any
    tops: Any
    totals: Any
    barrier: Any

    def gathered(self, wg: jax.Array, state: Any) -> Any:
        """Returns the merged state of all warpgroups, for the first one."""
        self.tops[wg], self.totals[wg] = state[:2]
        self.sums.at[wg][...] = state[2]
        plgpu.barrier_arrive(self.barrier)
        plgpu.barrier_wait(self.barrier)
        dims = self.sums.shape[1]
        partial_sums = [
            plgpu.load(self.sums.at[i], layout=_layout_of(dims)) for i in range(self.count)
        ]
        top = functools.reduce(jnp.maximum, [self.tops[i] for i in range(self.count)])
        weights = [weight_of(self.tops[i], top) for i in range(self.count)]
        total = sum(self.totals[i] * weight for i, weight in enumerate(weights))
        return (
            top,
            total,
            sum(
                broadcast_scalar(weights[i], dims) * partial_sum
                for i, partial_sum in enumerate(partial_sums)
            ),
        )


class MlaCombineCta:
    """A CTA that merges `chunk` packed rows of a request."""

    def __init__(
        self,
        first_rows: list[int],
        rows: int,
        chunk: int,
        sharers: CombineReduction | None,
        *,
        partial_lse: Any,
        slots: Any,
        lens: Any,
        scheduled_lens: Any,
        sinks: Any,
        out: Any,
        partial: Any,
        lse: Any,
    ):
        self.sinks = sinks
        self.first_rows, self.rows = first_rows, rows
        self.chunk, self.sharers = chunk, sharers
        self.partial_lse, self.out, self.partial, self.lse = partial_lse, out, partial, lse
        self.row, self.wg = lax.axis_index("row"), lax.axis_index("wg")
        self.slots = [slots[i, self.row] for i in range(3)]
        self.number = self.slots[1]
        if scheduled_lens is not None:
            self.number = jnp.where(lens[self.row] == scheduled_lens[self.row], self.number, 0)

    def run(self) -> None:
        has_many_pieces = self.number > (FEW if self.chunk > 1 else 0)
        pl.when(has_many_pieces)(lambda: self._each(min(MANY_BESIDE, self.chunk), AHEAD))
        if self.chunk > 1:
            rows_per_step = min(FEW_BESIDE, self.chunk)
            pl.when((self.number > 0) & ~has_many_pieces)(
                lambda: self._each(rows_per_step, AHEAD // rows_per_step)
            )

    def _each(self, rows_per_step: int, pieces_per_step: int) -> None:
        @pl.loop(0, self.chunk // rows_per_step)
        def _(i):
            first = lax.axis_index("chunk") * self.chunk + i * rows_per_step
            packed = [first + k for k in range(rows_per_step)]
            for row, state in zip(packed, self._merged(packed, pieces_per_step), strict=True):
                merged = state if self.sharers is None else self.sharers.gathered(self.wg, state)
                self._write(row, *merged)

    def _read(self, packed: Any, places: list[Any]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the (LSEs, pieces) of a row's partial results."""
        piece_refs = [
            self.partial.at[self.first_rows[1] + slot * self.rows + packed] for slot in places
        ]
        lses = [self.partial_lse[slot, packed] for slot in places]
        return lses, [plgpu.load(piece, layout=_layout_of(RANK)) for piece in piece_refs]

    def _merged(self, packed: list[Any], pieces_per_step: int) -> list[Any]:
        """Returns a warpgroup's share of the merged rows: all pieces, or every n-th."""
        sharers, num_pieces = 1 if self.sharers is None else self.sharers.count, self.number

        def add(j, states):
            numbers = [
                (j * sharers + self.wg) * pieces_per_step + k for k in range(pieces_per_step)
            ]
            places = [Schedule.slot_of(self.slots, jnp.minimum(k, num_pieces - 1)) for k in numbers]
            merged_states = []
            for state, (lses, pieces) in zip(
                states, [self._read(row, places) for row in packed], strict=True
            ):
                valid_lses = [
                    jnp.where(k < num_pieces, lse, -jnp.inf)
                    for k, lse in zip(numbers, lses, strict=True)
                ]
                merged_states.append(merge_into(state, valid_lses, pieces))
            return merged_states

        steps = lax.div(num_pieces + sharers * pieces_per_step - 1, sharers * pieces_per_step)
        zero = jnp.float32(0)
        empty = (jnp.float32(-jnp.inf), zero, broadcast_scalar(zero))
        return lax.fori_loop(0, steps, add, [empty] * len(packed))

    def _write(self, packed: Any, top: Any, total: Any, out: Any) -> None:
        @pl.when(self.wg == 0)
        def _():
            empty, new_top, total_with_sink = top == -jnp.inf, top, total
            rescale: Any = 1.0
            if self.sinks is not None:
                new_top = jnp.maximum(top, self.sinks[packed])
                rescale = weight_of(top, new_top)
                total_with_sink = total * rescale + weight_of(self.sinks[packed], new_top)
            normalized = out * broadcast_scalar(jnp.where(empty, 0.0, rescale / total_with_sink))
            at = self.first_rows[0] + self.row * self.rows + packed
            store(self.out.at[at], normalized.astype(self.out.dtype))
            lse = new_top + jnp.log2(total_with_sink) * (1 / LOG2E)
            store(self.lse.at[self.row, packed], jnp.where(empty, -jnp.inf, lse))
