"""The list of work for up to 8 tokens, in one launch: a thread for each pair (token, expert).

XLA takes half a dozen kernels for it, which is as long as a token's experts take to be read. The
list is `jaxattn.kernels.moe.work.work_list`'s of tokens that stay where they are. Fewer than 8 are
copied on the way to where there are 8 rows, as a tile reads so many; no one reads what the others
become. Experts come from the last to the first.

Limits: 8 tokens, 128 pairs, F a multiple of 128. Tests: tests/kernels/moe/test_work.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.launch import launch
from jaxattn.kernels.hopper.machine import meet
from jaxattn.kernels.moe.config import GROUP
from jaxattn.kernels.moe.work import EXPERT, FROM, GROUPS, TO, Work, stay

PAIRS = 128


def lists(tokens: int, top_k: int) -> bool:
    """Whether the kernel has a thread for each pair."""
    return stay(tokens) and tokens * top_k <= PAIRS


def work_of_few(
    ids: jax.Array,
    x: jax.Array,
    experts: int,
    *,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[Work, jax.Array]:
    """The list for `ids` int32 [T, K], and the tokens x [T, F] in 8 rows.

    An id that is no expert's has no work.
    """
    tokens, top_k = ids.shape
    pairs, features = tokens * top_k, x.shape[1]
    vector = next(n for n in (8, 4, 2, 1) if features % (n * PAIRS) == 0)
    of_token = plgpu.Layout.WG_STRIDED((features,), vec_size=vector)
    copied = tokens < GROUP
    layout = plgpu.Layout.WG_STRIDED((PAIRS,), vec_size=1)

    def full(value: Any) -> jax.Array:
        value = jnp.asarray(value, jnp.int32)
        return plgpu.layout_cast(lax.broadcast_in_dim(value, (PAIRS,), []), layout)

    def body(
        ids_ref, x_ref, tiles_ref, total_ref, positions_ref, rows_ref, first_smem, slot_smem
    ):  # fmt: skip
        if copied:
            for t in range(tokens):
                row = plgpu.load(x_ref.at[t], layout=of_token, optimized=False)
                rows_ref.at[t][...] = row
        pair = plgpu.broadcasted_iota(jnp.int32, (PAIRS,), 0, layout=layout)
        nobody = full(experts)

        def given(p: int) -> jax.Array:
            expert = ids_ref[p // top_k, p % top_k]
            return jnp.where((expert >= 0) & (expert < experts), expert, experts)

        every = [full(given(p)) for p in range(pairs)]
        mine, token = nobody, full(0)
        for p, expert in enumerate(every):
            mine = jnp.where(pair == full(p), expert, mine)
            token = jnp.where(pair >= full(p), full(p // top_k), token)
        # An expert's first pair stands for all of its pairs.
        first = mine
        for p, expert in enumerate(every):
            first = jnp.where((mine == expert) & (pair > full(p)), nobody, first)
        first_smem[...] = first
        meet(interpret=interpret)
        firsts = [full(first_smem[p]) for p in range(pairs)]
        # Its place in the list: how many experts of a higher number there are. The shared ones
        # have the highest and come first, before other weights drive theirs out of the L2 cache.
        slot, total = full(0), full(0)
        for expert in firsts:
            someone = expert < nobody
            slot += jnp.where((expert > mine) & someone, full(1), full(0))
            total += jnp.where(someone, full(1), full(0))
        slot_smem[...] = slot
        meet(interpret=interpret)
        expert = full(0)
        for p, one in enumerate(firsts):
            here = (full(slot_smem[p]) == pair) & (one < nobody)
            expert = jnp.where(here, one, expert)
        entries = {EXPERT: expert, FROM: full(0), TO: pair * full(GROUP), GROUPS: full(1)}
        for place, value in entries.items():
            tiles_ref.at[place][...] = value
        positions_ref[...] = jnp.where(mine < nobody, slot * full(GROUP) + token, full(-1))
        total_ref[...] = total

    ints = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)  # noqa: E731
    smem = plgpu.SMEM((PAIRS,), jnp.int32)
    out = launch(
        body,
        name="moe_list",
        grid={"block": 1},
        inputs={"ids_ref": ids, "x_ref": x if copied else None},
        outputs={
            "tiles_ref": ints(len((EXPERT, FROM, TO, GROUPS)), PAIRS),
            "total_ref": ints(PAIRS),
            "positions_ref": ints(PAIRS),
            "rows_ref": jax.ShapeDtypeStruct((GROUP, features), x.dtype) if copied else None,
        },
        scratch={"first_smem": smem, "slot_smem": smem},
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        detect_races=detect_races,
    )
    work = Work(out["tiles_ref"], out["total_ref"], out["positions_ref"], None)
    return work, out.get("rows_ref", x)
