"""The list of work for up to 8 tokens, in one launch: a thread for each pair (token, expert).

XLA takes half a dozen kernels for it, which is as long as a token's experts take to be read. The
list is `jaxattn.kernels.moe.work.work_list`'s of tokens that stay where they are. Fewer than 8 are
copied on the way to where there are 8 rows, as a tile reads so many; no one reads what the others
become.

Limits: 8 tokens, 128 pairs, F a multiple of 128. Tests: tests/kernels/moe/test_work.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.machine import interpret_mode, meet
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

    def body(ids_ref, *refs):
        x_ref: Any = refs[0] if copied else None
        tiles_ref, total_ref, positions_ref, *rows_ref, first_smem, slot_smem = refs[copied:]
        if copied:
            for t in range(tokens):
                row = plgpu.load(x_ref.at[t], layout=of_token, optimized=False)
                rows_ref[0].at[t][...] = row
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
        # Its place in the list: how many smaller experts there are.
        slot, total = full(0), full(0)
        for expert in firsts:
            slot += jnp.where(expert < mine, full(1), full(0))
            total += jnp.where(expert < nobody, full(1), full(0))
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
    numbers = ints(len((EXPERT, FROM, TO, GROUPS)), PAIRS), ints(PAIRS), ints(PAIRS)
    rows = (jax.ShapeDtypeStruct((GROUP, features), x.dtype),)
    kernel = plgpu.kernel(
        body,
        out_type=(*numbers, *rows[:copied]),
        scratch_types=[plgpu.SMEM((PAIRS,), jnp.int32), plgpu.SMEM((PAIRS,), jnp.int32)],
        grid=(1,),
        grid_names=("block",),
        num_threads=1,
        thread_name="wg",
        kernel_name="moe_list",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret_mode(interpret, detect_races=detect_races),
    )
    with jax.enable_x64(False):  # the kernel's integers are int32
        tiles, total, positions, *rows_of_x = kernel(ids, *(x,)[:copied])
    return Work(tiles, total, positions, None), rows_of_x[0] if copied else x
