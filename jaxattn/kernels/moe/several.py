"""The list of work for some dozens of tokens, and the tokens sorted by it, in one launch.

XLA takes ten kernels for it, 14 us of a layer on an H200. Here every block makes the whole list,
a pair (token, expert) a thread, and then does what belongs to a few of the pairs: it copies their
tokens to their rows, and writes the tiles of experts whose first pair is among them. The list is
`jaxattn.kernels.moe.work.work_list`'s. No one reads rows without a token.

    rank of a pair       pairs before it with its expert
    first row of it      the padded counts of experts with a lower number, summed

Limits: 128 to 512 pairs, F a multiple of 128. Tests: tests/kernels/moe/test_work.py.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.launch import launch
from jaxattn.kernels.hopper.machine import NUM_SMS, meet
from jaxattn.kernels.moe.config import GROUP, most_tiles, padded_rows
from jaxattn.kernels.moe.work import EXPERT, FROM, GROUPS, TO, Work, stay

THREADS = 128
MOST_PAIRS = 512
TOGETHER = 8  # pairs that a step of a loop compares with


def sorts(tokens: int, top_k: int, features: int) -> bool:
    """Whether the kernel has threads for so many pairs, and for a token's numbers."""
    fits = THREADS <= tokens * top_k <= MOST_PAIRS and features % THREADS == 0
    return not stay(tokens) and fits


def work_of_several(
    ids: jax.Array,
    x: jax.Array,
    experts: int,
    columns: int,
    *,
    blocks: int | None = None,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[Work, jax.Array]:
    """The list for `ids` int32 [T, K], and the tokens x [T, F] in its rows [R, F].

    An id that is no expert's has no work. `blocks` share the pairs; the interpreter takes two.
    """
    tokens, top_k = ids.shape
    pairs, features = tokens * top_k, x.shape[1]
    cut = Cut(
        pairs=pairs,
        top_k=top_k,
        experts=experts,
        columns=columns,
        most_of_expert=-(-tokens // columns),
        blocks=min(blocks or (2 if interpret else NUM_SMS), pairs),
        interpret=interpret,
    )
    ints = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)  # noqa: E731
    smem = plgpu.SMEM((cut.width,), jnp.int32)
    rows = padded_rows(tokens, top_k, experts, columns)
    out = launch(
        lambda **refs: Block(cut, Refs(**refs)).run(),
        name="moe_list",
        grid={"block": cut.blocks},
        inputs={"ids": ids.reshape(-1), "x": x},
        outputs={
            "tiles": ints(4, most_tiles(tokens, top_k, experts, columns)),
            "total": ints(1),
            "positions": ints(cut.width),
            "rows": jax.ShapeDtypeStruct((rows, features), x.dtype),
        },
        scratch={name: smem for name in ("expert", "padded", "start", "before", "place")},
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        detect_races=detect_races,
    )
    return Work(out["tiles"], out["total"], out["positions"], None), out["rows"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """What is known of a launch when it is traced.

    Attributes:
        columns: most rows of a tile.
        most_of_expert: most tiles of an expert, which all tokens may take.
    """

    pairs: int
    top_k: int
    experts: int
    columns: int
    most_of_expert: int
    blocks: int
    interpret: bool

    @property
    def width(self) -> int:
        """Pairs, rounded up to the threads."""
        return -(-self.pairs // THREADS) * THREADS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs:
    """What a block works on: operands and results, then its shared memory, of each pair."""

    ids: Any
    x: Any
    tiles: Any
    total: Any
    positions: Any
    rows: Any
    expert: Any  # `experts` for none
    padded: Any  # rows of the expert if the pair is its first, else 0
    start: Any  # the expert's first row
    before: Any  # tiles of experts with a lower number
    place: Any  # the pair's row, -1 for none


class Block:
    """All pairs in vectors, then some of them one by one."""

    def __init__(self, cut: Cut, refs: Refs):
        self.cut, self.refs = cut, refs
        self.number = lax.axis_index("block")
        self.layout = plgpu.Layout.WG_STRIDED((cut.width,), vec_size=1)

    def run(self) -> None:
        cut, refs = self.cut, self.refs
        self._load()
        mine = plgpu.load(refs.expert, layout=self.layout)
        someone = mine < self._full(cut.experts)
        none = self._full(0)
        rank, count = self._each(self._ranked(mine), none, none)
        padded = -(-count // GROUP) * GROUP
        refs.padded[...] = jnp.where(someone & (rank == none), padded, none)
        meet(interpret=cut.interpret)
        start, before, total = self._each(self._placed(mine), none, none, jnp.int32(0))
        place = jnp.where(someone, start + rank, self._full(-1))
        for target, vector in ((refs.start, start), (refs.before, before), (refs.place, place)):
            target[...] = vector
        meet(interpret=cut.interpret)

        @pl.when(self.number == 0)
        def _one_of_them():
            refs.positions[...] = place
            refs.total[0] = total

        for pair in range(0, cut.pairs, cut.blocks):
            mine_alone = self.number + pair
            pl.when(mine_alone < cut.pairs)(partial(self._finish, mine_alone))

    def _full(self, value: Any) -> jax.Array:
        value = jnp.asarray(value, jnp.int32)
        return plgpu.layout_cast(lax.broadcast_in_dim(value, (self.cut.width,), []), self.layout)

    def _load(self) -> None:
        """The experts of all pairs; what is behind the last pair is nobody's."""
        cut, refs = self.cut, self.refs
        layout = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
        refs.expert[...] = self._full(cut.experts)
        meet(interpret=cut.interpret)
        # The last ones are read with some before them, which are written a second time, the same.
        firsts = [*range(0, cut.pairs - THREADS, THREADS), cut.pairs - THREADS]
        for first in firsts:
            some = pl.ds(first, THREADS)
            given = plgpu.load(refs.ids.at[some], layout=layout, optimized=False)
            nobody = plgpu.layout_cast(jnp.full((THREADS,), cut.experts, jnp.int32), layout)
            valid = (given >= jnp.zeros_like(nobody)) & (given < nobody)
            refs.expert.at[some][...] = jnp.where(valid, given, nobody)
            meet(interpret=cut.interpret)

    def _each(self, function: Any, *sums: jax.Array) -> tuple[jax.Array, ...]:
        """`function(pair, *sums)` -> sums, for all pairs."""

        def some(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            for j in range(TOGETHER):
                sums = function(i * TOGETHER + j, *sums)
            return sums

        return lax.fori_loop(0, -(-self.cut.pairs // TOGETHER), some, sums)

    def _ranked(self, mine: jax.Array) -> Any:
        pair = plgpu.broadcasted_iota(jnp.int32, (self.cut.width,), 0, layout=self.layout)
        one, zero = self._full(1), self._full(0)

        def function(p: jax.Array, rank: jax.Array, count: jax.Array) -> tuple[jax.Array, ...]:
            same = mine == self._full(self.refs.expert[p])
            rank += jnp.where(same & (pair > self._full(p)), one, zero)
            return rank, count + jnp.where(same, one, zero)

        return function

    def _placed(self, mine: jax.Array) -> Any:
        zero, columns = self._full(0), self.cut.columns

        def function(
            p: jax.Array, start: jax.Array, before: jax.Array, total: jax.Array
        ) -> tuple[jax.Array, ...]:
            rows = self.refs.padded[p]
            tiles = lax.div(rows + (columns - 1), columns)
            lower = self._full(self.refs.expert[p]) < mine
            start += jnp.where(lower, self._full(rows), zero)
            before += jnp.where(lower, self._full(tiles), zero)
            return start, before, total + tiles

        return function

    def _finish(self, pair: jax.Array) -> None:
        """Copies a pair's token, and writes the tiles of an expert whose first pair it is."""
        cut, refs = self.cut, self.refs
        place, rows = refs.place[pair], refs.padded[pair]
        features = refs.x.shape[1]
        vector = next(n for n in (8, 4, 2, 1) if features % (n * THREADS) == 0)
        layout = plgpu.Layout.WG_STRIDED((features,), vec_size=vector)

        @pl.when(place >= 0)
        def _copy():
            row = refs.x.at[lax.div(pair, cut.top_k)]
            refs.rows.at[place][...] = plgpu.load(row, layout=layout, optimized=False)

        for i in range(cut.most_of_expert):

            @pl.when(rows > i * cut.columns)
            def _tile(i=i):
                tile, row = refs.before[pair] + i, refs.start[pair] + i * cut.columns
                groups = lax.div(jnp.minimum(rows - i * cut.columns, cut.columns), GROUP)
                entries = {EXPERT: refs.expert[pair], FROM: row, TO: row, GROUPS: groups}
                for entry, value in entries.items():
                    refs.tiles[entry, tile] = value
