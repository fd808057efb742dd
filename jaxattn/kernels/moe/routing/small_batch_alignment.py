"""Alignment of up to 8 tokens to expert tiles, in one launch: a thread for each (token, expert).

XLA takes half a dozen kernels for it, as long as reading a token's experts takes. The list is that
of `jaxattn.kernels.moe.routing.token_alignment.align_tokens` for tokens that stay in place. Fewer
than 8 tokens are copied to an array of 8 rows, because a tile reads 8; nobody reads the results of
the other rows.

One token's list is made where it is routed (`routing/router.py`), by the same code.

Limits: 8 tokens, 128 pairs, F at least 128 where tokens are copied. Tests:
tests/kernels/moe/test_token_alignment.py.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.instructions import warpgroup_barrier
from jaxattn.kernels.moe.routing.token_alignment import (
    EXPERT,
    FROM,
    GROUPS,
    TO,
    TokenAlignment,
    tokens_in_place,
)
from jaxattn.kernels.moe.tile_config import GROUP

PAIRS = 128


def supports_pairs(tokens: int, top_k: int) -> bool:
    """Whether the kernel has a thread for each pair."""
    return tokens_in_place(tokens) and tokens * top_k <= PAIRS


def copies(features: int) -> bool:
    """Whether a token has a number for each thread."""
    return features >= PAIRS


def windows(features: int) -> list[tuple[Any, Any]]:
    """Returns the windows of a token that the threads copy together, and their layouts. Each thread
    has the same number of elements, and parts of the last window are copied a second time."""
    whole = features // PAIRS * PAIRS
    vector = next(n for n in (8, 4, 2, 1) if whole % (n * PAIRS) == 0)
    found = [(pl.ds(0, whole), plgpu.Layout.WG_STRIDED((whole,), vec_size=vector))]
    if whole < features:
        last = pl.ds(features - PAIRS, PAIRS)
        found.append((last, plgpu.Layout.WG_STRIDED((PAIRS,), vec_size=1)))
    return found


def align_small_batch(
    ids: jax.Array,
    x: jax.Array,
    experts: int,
    *,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[TokenAlignment, jax.Array]:
    """Returns the list for `ids` int32 [T, K], and the tokens x [T, F] in 8 rows; x may have 8
    already.

    An id that is not an expert's has no work.
    """
    tokens, top_k = ids.shape
    features = x.shape[1]
    lister = SmallBatchAlignment(tokens, top_k, experts, features, interpret=interpret)
    copied = len(x) < GROUP

    def body(ids_ref, x_ref, tiles, total, positions, rows, **smem) -> None:
        if copied:
            lister.copy(x_ref, rows)
        given = [[ids_ref[t, k] for k in range(top_k)] for t in range(tokens)]
        lister.write(given, tiles, total, positions, **smem)

    out = launch(
        body,
        name="moe_list",
        grid={"block": 1},
        inputs={"ids_ref": ids, "x_ref": x if copied else None},
        outputs=lister.outputs(x.dtype if copied else None),
        scratch=lister.scratch(),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        detect_races=detect_races,
    )
    return alignment_of(out), out.get("rows", x)


def alignment_of(out: dict[str, Any]) -> TokenAlignment:
    """Returns the list among a launch's outputs."""
    return TokenAlignment(out["tiles"], out["total"], out["positions"], None)


@dataclasses.dataclass(frozen=True)
class SmallBatchAlignment:
    """A warpgroup's work list for T tokens that have K experts each."""

    tokens: int
    top_k: int
    experts: int
    features: int
    _: dataclasses.KW_ONLY
    interpret: bool

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((PAIRS,), vec_size=1)

    def outputs(self, dtype: Any) -> dict[str, Any]:
        """Returns the outputs of a launch; without a dtype no rows."""
        ints = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)  # noqa: E731
        rows = None if dtype is None else jax.ShapeDtypeStruct((GROUP, self.features), dtype)
        entries = len((EXPERT, FROM, TO, GROUPS))
        return {
            "tiles": ints(entries, PAIRS),
            "total": ints(PAIRS),
            "positions": ints(PAIRS),
            "rows": rows,
        }

    def scratch(self) -> dict[str, Any]:
        smem = plgpu.SMEM((PAIRS,), jnp.int32)
        return {"first_smem": smem, "slot_smem": smem}

    def copy(self, x: Any, rows: Any) -> None:
        """Copies the tokens to the array with 8 rows."""
        for t in range(self.tokens):
            for some, layout in windows(self.features):
                rows.at[t, some][...] = plgpu.load(x.at[t, some], layout=layout, optimized=False)

    def _full(self, value: Any) -> jax.Array:
        value = jnp.asarray(value, jnp.int32)
        return plgpu.layout_cast(lax.broadcast_in_dim(value, (PAIRS,), []), self.layout)

    def write(
        self,
        ids: list[list[Any]],
        tiles: Any,
        total: Any,
        positions: Any,
        first_smem: Any,
        slot_smem: Any,
    ) -> None:
        """Writes the list.

        Args:
            ids: A number for each token and pair.
        """
        full, pairs = self._full, self.tokens * self.top_k
        pair = plgpu.broadcasted_iota(jnp.int32, (PAIRS,), 0, layout=self.layout)
        nobody = full(self.experts)

        def known(expert: Any) -> jax.Array:
            return jnp.where((expert >= 0) & (expert < self.experts), expert, self.experts)

        every = [full(known(expert)) for of_token in ids for expert in of_token]
        mine, token = nobody, full(0)
        for p, expert in enumerate(every):
            mine = jnp.where(pair == full(p), expert, mine)
            token = jnp.where(pair >= full(p), full(p // self.top_k), token)
        # An expert's first pair stands for all of its pairs.
        first = mine
        for p, expert in enumerate(every):
            first = jnp.where((mine == expert) & (pair > full(p)), nobody, first)
        first_smem[...] = first
        warpgroup_barrier(interpret=self.interpret)
        firsts = [full(first_smem[p]) for p in range(pairs)]
        # Its place in the list is the number of smaller experts.
        slot, count = full(0), full(0)
        for expert in firsts:
            slot += jnp.where(expert < mine, full(1), full(0))
            count += jnp.where(expert < nobody, full(1), full(0))
        slot_smem[...] = slot
        warpgroup_barrier(interpret=self.interpret)
        expert = full(0)
        for p, one in enumerate(firsts):
            here = (full(slot_smem[p]) == pair) & (one < nobody)
            expert = jnp.where(here, one, expert)
        entries = {EXPERT: expert, FROM: full(0), TO: pair * full(GROUP), GROUPS: full(1)}
        for place, value in entries.items():
            tiles.at[place][...] = value
        positions[...] = jnp.where(mine < nobody, slot * full(GROUP) + token, full(-1))
        total[...] = count
