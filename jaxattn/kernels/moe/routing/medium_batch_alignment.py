"""Sort of some dozens of tokens by expert, with the work list, in one launch.

XLA takes ten kernels for it, 14 us of a layer on an H200. Here every CTA counts the pairs (token,
expert) of each expert, and then processes a few of the pairs. It copies their tokens to their rows,
and writes the tiles of experts whose first pair is among them. The list is that of
`jaxattn.kernels.moe.routing.token_alignment.align_tokens`. Rows without a token are read, but
nobody uses them.

    rank of a pair       pairs before it with its expert
    first row of it      the padded counts of experts with a lower number, summed

Limits: 128 to 1536 pairs, F at least 128. Tests: tests/kernels/moe/test_token_alignment.py.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS
from jaxattn.kernels.hopper.instructions import warpgroup_barrier
from jaxattn.kernels.hopper.mlir import ir, llvm
from jaxattn.kernels.hopper.ptx import asm, element, i32, pointer, times, word
from jaxattn.kernels.moe.routing.small_batch_alignment import copies, windows
from jaxattn.kernels.moe.routing.token_alignment import (
    EXPERT,
    FROM,
    GROUPS,
    TO,
    TokenAlignment,
    tokens_in_place,
)
from jaxattn.kernels.moe.tile_config import GROUP, compute_max_tiles, padded_rows

THREADS = 128
MOST_PAIRS = 1536
TILES = 2**16  # factor of the count of tiles, in one number with the count of rows


def supports_sort(tokens: int, top_k: int, features: int) -> bool:
    """Whether the kernel has enough threads for the pairs, and for a token's numbers."""
    fits = THREADS <= tokens * top_k <= MOST_PAIRS and copies(features)
    return not tokens_in_place(tokens) and fits


def align_and_sort_tokens(
    ids: jax.Array,
    x: jax.Array,
    experts: int,
    columns: int,
    *,
    blocks: int | None = None,
    interpret: bool = False,
) -> tuple[TokenAlignment, jax.Array]:
    """Returns the list for `ids` int32 [T, K], and the tokens x [T, F] in its rows [R, F].

    An id that is not an expert's has no work. `blocks` CTAs share the pairs; the interpreter takes
    two.
    """
    tokens, top_k = ids.shape
    pairs, features = tokens * top_k, x.shape[1]
    cut = TokenSortConfig(
        pairs=pairs,
        top_k=top_k,
        experts=experts,
        columns=columns,
        blocks=min(blocks or (2 if interpret else NUM_SMS), pairs),
        interpret=interpret,
    )
    ints = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)  # noqa: E731
    rows = padded_rows(tokens, top_k, experts, columns)
    out = launch(
        lambda **refs: TokenSortCta(cut, TokenSortRefs(**refs)).run(),
        name="moe_list",
        grid={"block": cut.blocks},
        inputs={"ids": ids.reshape(-1), "x": x},
        outputs={
            "tiles": ints(4, compute_max_tiles(tokens, top_k, experts, columns)),
            "total": ints(1),
            "positions": ints(pairs),
            "rows": jax.ShapeDtypeStruct((rows, features), x.dtype),
        },
        scratch={
            "expert": plgpu.SMEM((cut.width,), jnp.int32),
            "count": plgpu.SMEM((cut.experts_width,), jnp.int32),
        },
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return TokenAlignment(out["tiles"], out["total"], out["positions"], None), out["rows"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSortConfig:
    """The static properties of a launch, known when it is traced.

    Attributes:
        columns: The most rows of a tile.
    """

    pairs: int
    top_k: int
    experts: int
    columns: int
    blocks: int
    interpret: bool

    @property
    def width(self) -> int:
        """The number of pairs, rounded up to the threads."""
        return -(-self.pairs // THREADS) * THREADS

    @property
    def experts_width(self) -> int:
        """The number of experts, rounded up to the threads."""
        return -(-self.experts // THREADS) * THREADS


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSortRefs:
    """The refs of a CTA: operands and results, then its shared memory, for each pair."""

    ids: Any
    x: Any
    tiles: Any
    total: Any
    positions: Any
    rows: Any
    expert: Any  # of each pair, `experts` for none
    count: Any  # of each expert's pairs


class TokenExpertPair(NamedTuple):
    """One of a CTA's pairs.

    Attributes:
        rank: The number of its expert's pairs before it.
        row, tile: The first row and tile of its expert.
        has_expert: Whether it has an expert.
    """

    number: jax.Array
    expert: jax.Array
    rank: jax.Array
    row: jax.Array
    tile: jax.Array
    has_expert: jax.Array


class TokenSortCta:
    """A CTA that processes all pairs as vectors, then some of them one by one."""

    def __init__(self, cut: TokenSortConfig, refs: TokenSortRefs):
        self.cut, self.refs = cut, refs
        self.number = lax.axis_index("block")

    def run(self) -> None:
        cut, refs = self.cut, self.refs
        self._load()
        experts = plgpu.load(refs.expert, layout=strided(cut.width))
        self._count(experts)
        counts = plgpu.load(refs.count, layout=strided(cut.experts_width))
        rows = -(-counts // GROUP) * GROUP
        both = rows + -(-rows // cut.columns) * TILES
        mine = [
            self._pair(self.number + first, experts, both)
            for first in range(0, cut.pairs, cut.blocks)
        ]
        tokens = [self._token(pair) for pair in mine]  # all loads in flight together
        for pair, token in zip(mine, tokens, strict=True):
            pl.when(pair.number < cut.pairs)(partial(self._finish, pair, token))

        @pl.when(self.number == 0)
        def _one_of_them():
            refs.total[0] = lax.div(jnp.sum(both), TILES)

    def _load(self) -> None:
        """Loads the experts of all pairs; places after the last pair have no expert."""
        cut, refs = self.cut, self.refs
        refs.expert[...] = full(cut.experts, cut.width)
        warpgroup_barrier(interpret=cut.interpret)
        # The last pairs are read together with earlier ones, which are written a second time, with
        # the same values.
        firsts = [*range(0, cut.pairs - THREADS, THREADS), cut.pairs - THREADS]
        for first in firsts:
            some = pl.ds(first, THREADS)
            given = plgpu.load(refs.ids.at[some], layout=strided(THREADS), optimized=False)
            nobody = full(cut.experts, THREADS)
            valid = (given >= full(0, THREADS)) & (given < nobody)
            refs.expert.at[some][...] = jnp.where(valid, given, nobody)
            warpgroup_barrier(interpret=cut.interpret)

    def _count(self, experts: jax.Array) -> None:
        """Counts each expert's pairs."""
        cut, refs = self.cut, self.refs
        width = cut.experts_width
        if cut.interpret:  # which cannot run inline PTX
            number = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=strided(width))
            known = number < full(cut.experts, width)

            def another(p: jax.Array, sums: jax.Array) -> jax.Array:
                return sums + jnp.where(known & (number == full(refs.expert[p], width)), 1, 0)

            refs.count[...] = lax.fori_loop(0, cut.pairs, another, full(0, width))
        else:
            refs.count[...] = full(0, width)
            warpgroup_barrier(interpret=False)
            count_each(experts, refs.count, cut.experts)
        warpgroup_barrier(interpret=cut.interpret)

    def _pair(self, number: jax.Array, experts: jax.Array, both: jax.Array) -> TokenExpertPair:
        """Returns the CTA's pair `number`.

        Args:
            both: For each expert its rows, plus `TILES` times its tiles.
        """
        cut = self.cut
        here = jnp.minimum(number, cut.pairs - 1)
        expert = self.refs.expert[here]
        others = plgpu.broadcasted_iota(jnp.int32, both.shape, 0, layout=strided(both.size))
        before = jnp.where(others < full(expert, both.size), both, full(0, both.size))
        sums = jnp.sum(before)
        pairs = plgpu.broadcasted_iota(jnp.int32, experts.shape, 0, layout=strided(cut.width))
        same = (experts == full(expert, cut.width)) & (pairs < full(here, cut.width))
        rank = jnp.sum(jnp.where(same, full(1, cut.width), full(0, cut.width)))
        tile = lax.div(sums, TILES)
        has_expert = (number < cut.pairs) & (expert < cut.experts)
        return TokenExpertPair(number, expert, rank, sums - tile * TILES, tile, has_expert)

    def _token(self, pair: TokenExpertPair) -> list[jax.Array]:
        x = self.refs.x
        token = lax.div(jnp.minimum(pair.number, self.cut.pairs - 1), self.cut.top_k)
        return [
            plgpu.load(x.at[token, some], layout=layout, optimized=False)
            for some, layout in windows(x.shape[1])
        ]

    def _finish(self, pair: TokenExpertPair, token: list[jax.Array]) -> None:
        """Stores a pair's token, and writes the tiles of an expert whose first pair it is."""
        cut, refs = self.cut, self.refs
        place = pair.row + pair.rank
        refs.positions[pair.number] = jnp.where(pair.has_expert, place, -1)

        @pl.when(pair.has_expert)
        def _store():
            for (some, _), numbers in zip(windows(refs.x.shape[1]), token, strict=True):
                refs.rows.at[place, some][...] = numbers

        @pl.when(pair.has_expert & (pair.rank == 0))
        def _tiles():
            count = refs.count[jnp.minimum(pair.expert, cut.experts - 1)]
            rows = lax.div(count + (GROUP - 1), GROUP) * GROUP

            @pl.loop(0, lax.div(rows + (cut.columns - 1), cut.columns))
            def _each(i):
                self._tile(pair, rows, i)

    def _tile(self, pair: TokenExpertPair, rows: jax.Array, i: int) -> None:
        tile, row = pair.tile + i, pair.row + i * self.cut.columns
        groups = lax.div(jnp.minimum(rows - i * self.cut.columns, self.cut.columns), GROUP)
        entries = {EXPERT: pair.expert, FROM: row, TO: row, GROUPS: groups}
        for entry, value in entries.items():
            self.refs.tiles[entry, tile] = value


def strided(width: int) -> Any:
    return plgpu.Layout.WG_STRIDED((width,), vec_size=1)


def full(value: Any, width: int) -> jax.Array:
    value = lax.broadcast_in_dim(jnp.asarray(value, jnp.int32), (width,), [])
    return plgpu.layout_cast(value, strided(width))


def count_each(numbers: jax.Array, counts: Any, most: int) -> None:
    """Adds 1 to the place of each number below `most` in int32 shared memory."""
    plgpu.inline_mgpu(arg_types=(strided(numbers.size), plgpu.RefType()))(
        lambda _, numbers, counts: _count_each(numbers, counts, most)
    )(numbers, counts)


def _count_each(numbers: Any, counts: Any, most: int) -> None:
    for register in numbers.registers.flat:
        of_one = element(register, 0) if isinstance(register.type, ir.VectorType) else register
        place = llvm.ptrtoint(i32(), pointer(counts, times(of_one, 4)))
        asm(
            "{ .reg .pred some; setp.lt.u32 some, $1, $2; @some red.shared.add.u32 [$0], 1; }",
            [], [place, of_one, word(most)], "r,r,r,~{memory}",
        )  # fmt: skip
