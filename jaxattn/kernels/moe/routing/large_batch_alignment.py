"""Permutation of many tokens into the order of experts, with the work list, in three launches.

XLA sorts, scatters and gathers for it, in a dozen kernels: 115 us of a layer of DeepSeek-V2-Lite at
2,048 tokens (H200). The pairs (token, expert) are divided into segments, one per CTA:

    moe_count      counts each segment's pairs of each expert
    moe_place      gives each pair its row, and writes the tiles
    moe_permute    copies each token, which is read once, to the rows of its pairs

    rank of a pair       pairs of its segment before it with its expert
    row of a pair        the first row of its expert, the expert's pairs in earlier segments, and
                         its rank

The list is that of `jaxattn.kernels.moe.routing.token_alignment.align_tokens`. Rows without a token
are not written; they are read, but nobody uses them.

Limits: F a multiple of 128. Tests: tests/kernels/moe/test_token_alignment.py.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.instructions import warpgroup_barrier
from jaxattn.kernels.moe.routing.medium_batch_alignment import (
    MOST_PAIRS,
    THREADS,
    count_each,
    full,
    strided,
)
from jaxattn.kernels.moe.routing.small_batch_alignment import windows
from jaxattn.kernels.moe.routing.token_alignment import (
    EXPERT,
    FROM,
    GROUPS,
    TO,
    TokenAlignment,
)
from jaxattn.kernels.moe.tile_config import GROUP, compute_max_tiles, padded_rows

FEW_SEGMENTS = 128  # at most this many, if their pairs are at most WIDEST
SEGMENTS = (256, 512)  # pairs of a segment
TOGETHER = 8  # loads and comparisons per iteration of a loop


def supports_permutation(tokens: int, top_k: int, features: int) -> bool:
    """Whether there are too many pairs for one launch, and enough threads for a token's numbers."""
    return tokens * top_k > MOST_PAIRS and features % THREADS == 0


def permute_tokens(
    ids: jax.Array,
    x: jax.Array,
    experts: int,
    columns: int,
    *,
    interpret: bool = False,
) -> tuple[TokenAlignment, jax.Array]:
    """Returns the list for `ids` int32 [T, K], and the tokens x [T, F] in its rows [R, F].

    An id that is not an expert's has no work.
    """
    tokens, top_k = ids.shape
    pairs = tokens * top_k
    cut = PermutationConfig(
        segment=next((s for s in SEGMENTS if s * FEW_SEGMENTS >= pairs), SEGMENTS[-1]),
        pairs=pairs,
        experts=experts,
        columns=columns,
        tiles=compute_max_tiles(tokens, top_k, experts, columns),
        interpret=interpret,
    )
    flat = jnp.pad(ids.reshape(-1), (0, cut.segments * cut.segment - pairs), constant_values=-1)
    one: dict[str, Any] = dict(
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    ints = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)  # noqa: E731
    some = lambda size: plgpu.SMEM((size,), jnp.int32)  # noqa: E731
    counts = launch(
        functools.partial(count_segment, cut),
        name="moe_count",
        grid={"block": cut.segments},
        inputs={"ids": flat},
        outputs={"counts": ints(cut.segments, cut.width)},
        scratch={"expert": some(cut.segment), "count": some(cut.width)},
        **one,
    )["counts"]
    placed = launch(
        lambda **refs: PlacementCta(cut, PlacementRefs(**refs)).run(),
        name="moe_place",
        grid={"block": cut.segments},
        inputs={"ids": flat, "counts": counts},
        outputs={"tiles": ints(4, cut.tiles), "total": ints(1), "positions": ints(flat.size)},
        scratch={"expert": some(cut.segment), "rows": some(cut.width), "before": some(cut.width)},
        **one,
    )
    rows = launch(
        functools.partial(copy_token, top_k),
        name="moe_permute",
        grid={"token": tokens},
        inputs={"x": x, "positions": placed["positions"]},
        outputs={
            "rows": jax.ShapeDtypeStruct(
                (padded_rows(tokens, top_k, experts, columns), x.shape[1]), x.dtype
            )
        },
        **one,
    )["rows"]
    return TokenAlignment(placed["tiles"], placed["total"], placed["positions"], None), rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class PermutationConfig:
    """The static properties of the launches, known when they are traced.

    Attributes:
        segment: Pairs of a segment, a multiple of the threads.
        columns: The most rows of a tile.
        tiles: The most tiles.
    """

    segment: int
    pairs: int
    experts: int
    columns: int
    tiles: int
    interpret: bool

    @property
    def segments(self) -> int:
        return -(-self.pairs // self.segment)

    @property
    def width(self) -> int:
        """The number of experts, rounded up to the threads."""
        return -(-self.experts // THREADS) * THREADS

    def experts_of(self, ids: Any) -> jax.Array:
        """Returns the experts of this CTA's pairs, `experts` for none."""
        first = pl.multiple_of(lax.axis_index("block") * self.segment, self.segment)
        here = ids.at[pl.ds(first, self.segment)]
        given = plgpu.load(here, layout=strided(self.segment), optimized=False)
        nobody = full(self.experts, self.segment)
        return jnp.where((given >= full(0, self.segment)) & (given < nobody), given, nobody)


def count_segment(cut: PermutationConfig, ids: Any, counts: Any, expert: Any, count: Any) -> None:
    """Counts a segment's pairs of each expert."""
    experts, width = cut.experts_of(ids), cut.width
    if cut.interpret:  # which cannot run inline PTX
        expert[...] = experts
        warpgroup_barrier(interpret=True)
        number = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=strided(width))
        known = number < full(cut.experts, width)

        def another(p: jax.Array, sums: jax.Array) -> jax.Array:
            return sums + jnp.where(known & (number == full(expert[p], width)), 1, 0)

        found = lax.fori_loop(0, cut.segment, another, full(0, width))
    else:
        count[...] = full(0, width)
        warpgroup_barrier(interpret=False)
        count_each(experts, count, cut.experts)
        warpgroup_barrier(interpret=False)
        found = plgpu.load(count, layout=strided(width))
    counts.at[lax.axis_index("block")][...] = found


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementRefs:
    """The refs of a CTA: operands and results, then its shared memory."""

    ids: Any
    counts: Any  # per segment and expert
    tiles: Any
    total: Any
    positions: Any
    expert: Any  # of each pair of the segment, `experts` for none
    rows: Any  # of each expert, padded
    before: Any  # per expert, its pairs in earlier segments


class PlacementCta:
    """A CTA that computes the rows of a segment's pairs, and the tiles of some experts."""

    def __init__(self, cut: PermutationConfig, refs: PlacementRefs):
        self.cut, self.refs = cut, refs
        self.number = lax.axis_index("block")

    def run(self) -> None:
        cut, refs = self.cut, self.refs
        experts = cut.experts_of(refs.ids)
        refs.expert[...] = experts
        total, before = self._sums()
        rows = -(-total // GROUP) * GROUP
        refs.rows[...] = rows
        refs.before[...] = before
        warpgroup_barrier(interpret=cut.interpret)
        positions = self._firsts(experts) + self._ranks(experts)
        size = cut.segment
        has_expert = experts < full(cut.experts, size)
        first = pl.multiple_of(self.number * size, size)
        refs.positions.at[pl.ds(first, size)][...] = jnp.where(
            has_expert, positions, full(-1, size)
        )
        tiles = -(-rows // cut.columns)

        @pl.loop(0, lax.div(cut.experts - self.number + (cut.segments - 1), cut.segments))
        def _expert(i):
            self._tiles(self.number + i * cut.segments, rows, tiles)

        @pl.when(self.number == 0)
        def _one_of_them():
            refs.total[0] = jnp.sum(tiles)

    def _sums(self) -> tuple[jax.Array, jax.Array]:
        """Returns, for each expert, its pairs in all segments and in those before this one."""
        width, segments = self.cut.width, self.cut.segments

        def some(turn: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
            total, before = carry
            numbers = [turn * TOGETHER + j for j in range(TOGETHER)]
            loaded = [
                plgpu.load(
                    self.refs.counts.at[jnp.minimum(number, segments - 1)],
                    layout=strided(width),
                    optimized=False,
                )
                for number in numbers
            ]
            for number, counts in zip(numbers, loaded, strict=True):
                total += counts * full((number < segments).astype(jnp.int32), width)
                before += counts * full((number < self.number).astype(jnp.int32), width)
            return total, before

        zero = full(0, width)
        return lax.fori_loop(0, -(-segments // TOGETHER), some, (zero, zero))

    def _firsts(self, experts: jax.Array) -> jax.Array:
        """Returns, for each pair, the row of the segment's first pair with its expert."""
        size, refs = self.cut.segment, self.refs

        def some(turn: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
            row, found = carry
            for j in range(TOGETHER):
                expert = turn * TOGETHER + j
                mine = experts == full(expert, size)
                found = jnp.where(mine, full(row + refs.before[expert], size), found)
                row += refs.rows[expert]
            return row, found

        turns = -(-self.cut.experts // TOGETHER)
        return lax.fori_loop(0, turns, some, (jnp.int32(0), full(0, size)))[1]

    def _ranks(self, experts: jax.Array) -> jax.Array:
        size, refs = self.cut.segment, self.refs
        number = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=strided(size))

        def some(turn: jax.Array, ranks: jax.Array) -> jax.Array:
            for j in range(TOGETHER):
                other = turn * TOGETHER + j
                same = experts == full(refs.expert[other], size)
                earlier = same & (number > full(other, size))
                ranks += jnp.where(earlier, full(1, size), full(0, size))
            return ranks

        return lax.fori_loop(0, size // TOGETHER, some, full(0, size))

    def _tiles(self, expert: jax.Array, rows: jax.Array, tiles: jax.Array) -> None:
        """Writes an expert's tiles."""
        cut = self.cut
        others = plgpu.broadcasted_iota(jnp.int32, rows.shape, 0, layout=strided(cut.width))
        earlier, none = others < full(expert, cut.width), full(0, cut.width)
        first = jnp.sum(jnp.where(earlier, rows, none))
        number = jnp.sum(jnp.where(earlier, tiles, none))
        own = self.refs.rows[expert]

        @pl.loop(0, lax.div(own + (cut.columns - 1), cut.columns))
        def _each(i):
            row, left = first + i * cut.columns, own - i * cut.columns
            groups = lax.div(jnp.minimum(left, cut.columns), GROUP)
            entries = {EXPERT: expert, FROM: row, TO: row, GROUPS: groups}
            for entry, value in entries.items():
                self.refs.tiles[entry, number + i] = value


def copy_token(top_k: int, x: Any, positions: Any, rows: Any) -> None:
    """Copies a token to the rows of its pairs."""
    token, features = lax.axis_index("token"), x.shape[1]
    places = [positions[token * top_k + k] for k in range(top_k)]
    ((_, layout),) = windows(features)
    numbers = plgpu.load(x.at[token], layout=layout, optimized=False)
    for place in places:

        @pl.when(place >= 0)
        def _copy(place=place):
            rows.at[place][...] = numbers
