"""The body of `gqa_decode`: a warpgroup loads, and two take the steps of a part in turns.

Packed rows (query token, head of the group) are the columns of both products, so that eight of them
cost eight columns:

    scores^T [64 tokens, N] = K Q^T          K [64, D] of a step and KV head
    out^T    [D, N]        += V^T P^T        V [64, D] of the same tokens, seen transposed

The producer walks the part ahead of the others, from piece to piece, and fills a ring of each
warpgroup's; keys' places in it are free again once the scores are there, before the values' are.
e4m3 numbers go through registers on their way to a product; fp8.py says how.
The softmax runs over the scores turned round through shared memory, so that a column's lie in half
a warp; P goes back the same way. At a piece's end merge.py makes one result of the two warpgroups'.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gqa_decode.fp8 import P_EXPONENT, Tiles, in_order
from jaxattn.kernels.gqa_decode.memory import CONSUMERS, QUERIES, Memory, over_out
from jaxattn.kernels.gqa_decode.merge import Epilogue, Outputs, merge, write_nothing
from jaxattn.kernels.gqa_decode.pairs import KEYS, VALUES, Pairs
from jaxattn.kernels.hopper.machine import meet
from jaxattn.kernels.hopper.turned import store_turned
from jaxattn.kernels.mla_decode.columns_memory import BY_COLUMN, BY_ROW, SCORES
from jaxattn.kernels.mla_decode.part import Place, visible_keys
from jaxattn.kernels.mla_decode.rows_scores import EMPTY, LOG2E, MASKED
from jaxattn.kernels.mla_decode.schedule import PAGE

PRODUCT = plgpu.Layout.WGMMA
CLEARED = 64  # dims of values that are cleared at a time
MANY_NUMBERS = 2048  # of an output [D, N]


def make_body(
    *,
    q_len: int,
    group: int,
    kv_heads: int,
    head_dim: int,
    columns: int,
    out_rows: int,
    parts: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    dtype: Any,
    fp8: bool,
    page_size: int,
    ahead: tuple[int, int],
    split: bool,
    ordered: bool,
    ragged: bool,
    sinks: bool,
    gated: bool,
    interpret: bool,
) -> Any:
    """The kernel's function of (first rows of the lanes, *refs in `gqa_decode_mosaic`'s order).

    Args:
        columns: N, packed rows s * group + j of a block.
        out_rows: packed rows that the output keeps of a pair.
        dtype: of queries and P as operands.
        fp8: whether keys and values are e4m3; scores then have factors in the place of `scale`.
        ahead: steps of a warpgroup's rings, of keys and of values.
        split: whether there are partial results.
        ordered: whether the schedule has an order.
        ragged: whether rows have lengths of their own among the S tokens.
        sinks, gated: whether there are such.
    """
    tokens = min(page_size, PAGE)
    rows = min(head_dim, 128)  # of a product of values
    blocks = head_dim // rows
    tiles = Tiles(head_dim) if fp8 else None
    # A power of two by which P is larger than its sum says, beside the sum of such P.
    room = P_EXPONENT if fp8 else 0
    # Three warpgroups have 168 registers each, or 40, 232 and 232. The producer gives some away
    # where outputs and descriptors of the products' tiles are many.
    many_registers = columns * head_dim >= MANY_NUMBERS

    def over_keys(vector: jax.Array) -> jax.Array:
        """Of each packed row, for its scores."""
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, (columns, PAGE), [0]), SCORES)

    def iota(dimension: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (columns, PAGE), dimension, layout=SCORES)

    def place_of(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(warpgroup, its turn) of a part's step."""
        return lax.rem(step, CONSUMERS), lax.div(step, CONSUMERS)

    def produce(part: Pairs, q_ref: Any, mine: Any, memory: Memory) -> None:
        def piece(place: Place, start: jax.Array, steps: jax.Array, carry: Any) -> Any:
            number, done = carry
            pair, stop = place.row, start + steps
            at = lax.rem(number, QUERIES)
            # Before the queries' place is waited for, the first page's number is asked for.
            numbers = part.numbers(pair, start, stop)
            pl.when(number >= QUERIES)(lambda: plgpu.barrier_wait(memory.queries_read.at[at]))
            there = memory.queries_loaded.at[at]
            plgpu.copy_gmem_to_smem(q_ref.at[pair, mine], memory.queries.at[at], there)

            def step(i, numbers):
                wg, turn = place_of(done + i)
                following = part.numbers(pair, start + i + 1, stop)
                for kind, to, loaded, read in (
                    (KEYS, memory.keys, memory.keys_loaded, memory.keys_read),
                    (VALUES, memory.values, memory.values_loaded, memory.values_read),
                ):
                    slot = lax.rem(turn, ahead[kind])
                    free = functools.partial(plgpu.barrier_wait, read.at[wg, slot])
                    pl.when(turn >= ahead[kind])(free)
                    for j, box in enumerate(part.boxes(kind, pair, numbers, start + i)):
                        some = to.at[wg, slot, pl.ds(j * tokens, tokens)]
                        plgpu.copy_gmem_to_smem(box, some, loaded.at[wg, slot])
                # A barrier tells odd rounds from even ones: no warp may be a round behind.
                meet(interpret=interpret)
                return following

            lax.fori_loop(0, steps, step, numbers)
            return number + 1, done + steps

        number, done = part.each_piece(piece, (jnp.int32(0), jnp.int32(0)))

        # What nobody waited for: the last steps of each ring, and the last queries.
        for steps, read in zip(ahead, (memory.keys_read, memory.values_read), strict=True):

            @pl.loop(jnp.maximum(done - CONSUMERS * steps, 0), done)
            def _drain(step, steps=steps, read=read):
                wg, turn = place_of(step)
                plgpu.barrier_wait(read.at[wg, lax.rem(turn, steps)])

        @pl.loop(jnp.maximum(number - QUERIES, 0), number)
        def _drain_queries(i):
            plgpu.barrier_wait(memory.queries_read.at[lax.rem(i, QUERIES)])

    def consume(
        part: Pairs,
        wg: jax.Array,
        first_column: jax.Array,
        epilogue: Epilogue[Memory],
        factors_ref: Any,
    ) -> None:
        memory = epilogue.memory
        scores_smem, p_smem = memory.scores.at[wg], memory.p.at[wg]
        rescale_smem = memory.stats.at[0, wg]

        def piece(place: Place, start: jax.Array, steps: jax.Array, carry: Any) -> Any:
            number, done = carry
            pair = place.row
            length, queries = part.length_of(pair), part.queries_of(pair)
            begin = part.first_key(pair)
            first_token = (start + part.first_step_of(pair)) * PAGE
            factor: Any = scale
            if factors_ref is not None:
                of_rows = factors_ref.at[pair, epilogue.outputs.columns]
                factor = over_keys(plgpu.load(of_rows, layout=BY_ROW, optimized=False))
            visible = visible_keys(
                first_column + iota(0), length, queries,
                q_len=q_len, num_heads=group, layout=SCORES,
            )  # fmt: skip
            queries_at = lax.rem(number, QUERIES)
            plgpu.barrier_wait(memory.queries_loaded.at[queries_at])
            # The piece's steps that are this warpgroup's.
            first = lax.rem(done + wg, CONSUMERS)
            taken = lax.div(steps + (CONSUMERS - 1) - first, CONSUMERS)

            def scores_of(ref: Any, keys: Any) -> jax.Array:
                if tiles is None:
                    of_queries = memory.queries.at[queries_at].transpose((1, 0))
                    plgpu.wgmma(ref, keys, of_queries)
                    return ref[...]
                for i in range(tiles.blocks):
                    some = memory.queries.at[queries_at, :, pl.ds(i * rows, rows)]
                    plgpu.wgmma(ref, tiles.keys(keys, i), some.transpose((1, 0)))
                    plgpu.wgmma_wait(1)
                return ref[...]

            def interpreted_scores(keys: Any) -> jax.Array:
                wide = in_order(keys[...].astype(jnp.float32))
                return jnp.dot(wide, memory.queries[queries_at].astype(jnp.float32).T)

            def soften(scores: jax.Array, token: jax.Array, top: jax.Array) -> Any:
                """(maxima, P, rescaling) with a step's scores, the first of token `token`."""
                store_turned(scores_smem.at[:, pl.ds(0, PAGE)], scores, interpret=interpret)
                plgpu.commit_smem()
                some = scores_smem.at[:, pl.ds(0, PAGE)]
                scores = plgpu.load(some, layout=SCORES, optimized=False)
                if soft_cap is None:
                    scores = scores * (factor * LOG2E)
                else:
                    # tanh, whose approximate instruction is off by 2**-11 of the cap.
                    power = jnp.exp2(scores * (factor * (2 * LOG2E / soft_cap)))
                    scores = (1.0 - 2.0 / (power + 1.0)) * (soft_cap * LOG2E)
                key = iota(1) + token
                seen = key < visible
                if window is not None:
                    seen &= key >= visible - window
                scores = jnp.where(seen, scores, MASKED)
                new_top = jnp.maximum(top, scores.max(axis=1) - room)
                p = jnp.exp2(scores - over_keys(new_top))
                return new_top, p, jnp.exp2(top - new_top)

            def clear(values: Any, token: jax.Array) -> None:
                """0 * NaN is NaN: what no query of the row sees becomes 0 as a value."""
                outside = length < token + PAGE
                if begin is not None:
                    outside |= token < begin

                @pl.when(outside)
                def _():
                    if tiles is not None and not interpret:
                        first = jnp.int32(0) if begin is None else begin - token
                        tiles.clear(values, first, length - token)
                        return
                    for at in range(0, head_dim, CLEARED):
                        some = values.at[:, pl.ds(at, CLEARED)]
                        key = plgpu.broadcasted_iota(
                            jnp.int32, (PAGE, CLEARED), 0, layout=PRODUCT
                        ) + token  # fmt: skip
                        inside = key < length
                        if begin is not None:
                            inside &= key >= begin
                        kept = plgpu.load(some, layout=PRODUCT)
                        some[...] = jnp.where(inside, kept, jnp.zeros((), values.dtype))

            def add_values(refs: Any, accs: tuple[jax.Array, ...], values: Any) -> Any:
                of_p = p_smem.transpose((1, 0))
                rescale = over_out(plgpu.load(rescale_smem, layout=BY_COLUMN), rows)
                accs = tuple(acc * rescale for acc in accs)
                if interpret:
                    wide, p = values[...].astype(jnp.float32), of_p[...].astype(jnp.float32)
                    some = [wide[:, i * rows : (i + 1) * rows].T for i in range(blocks)]
                    return tuple(acc + jnp.dot(v, p) for acc, v in zip(accs, some, strict=True))
                for ref, acc in zip(refs, accs, strict=True):
                    ref[...] = acc
                for i, ref in enumerate(refs):
                    if tiles is not None:
                        plgpu.wgmma(ref, tiles.values(values, i), of_p)
                        plgpu.wgmma_wait(1)
                        continue
                    plgpu.wgmma(ref, values.at[:, pl.ds(i * rows, rows)].transpose((1, 0)), of_p)
                return tuple(ref[...] for ref in refs)

            def each(i, carry):
                top, total, accs = carry
                step = first + CONSUMERS * i
                keys_at, values_at = (lax.rem(place_of(done + step)[1], n) for n in ahead)
                token = first_token + step * PAGE
                plgpu.barrier_wait(memory.keys_loaded.at[wg, keys_at])
                keys = memory.keys.at[wg, keys_at]
                if tiles is not None and interpret:
                    scores = interpreted_scores(keys)
                else:
                    run = functools.partial(scores_of, keys=keys)
                    scores = pl.run_scoped(run, plgpu.ACC((PAGE, columns), jnp.float32))
                top, p, rescale = soften(scores, token, top)
                # All four warps have their scores, as they met to exchange them.
                plgpu.barrier_arrive(memory.keys_read.at[wg, keys_at])
                total = total * over_keys(rescale) + p
                p_smem[...] = p.astype(dtype)
                rescale_smem[...] = rescale
                values = memory.values.at[wg, values_at]
                plgpu.barrier_wait(memory.values_loaded.at[wg, values_at])
                clear(values, token)
                plgpu.commit_smem()
                add = functools.partial(add_values, accs=accs, values=values)
                if interpret:
                    accs = add(())
                else:
                    out_type = plgpu.ACC((rows, columns), jnp.float32)
                    accs = pl.run_scoped(lambda *refs: add(refs), *[out_type] * blocks)
                plgpu.commit_smem()  # all four warps have read the values
                plgpu.barrier_arrive(memory.values_read.at[wg, values_at])
                return top, total, accs

            nothing = plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), PRODUCT)
            empty = (
                plgpu.layout_cast(jnp.full((columns,), EMPTY, jnp.float32), BY_ROW),
                plgpu.layout_cast(jnp.zeros((columns, PAGE), jnp.float32), SCORES),
                (nothing,) * blocks,
            )
            top, total, accs = lax.fori_loop(0, taken, each, empty)
            merge(accs, top, total.sum(axis=1), epilogue, pair, steps)
            # Only here all four warps are known to have seen the queries come.
            plgpu.barrier_arrive(memory.queries_read.at[queries_at])
            return number + 1, done + steps

        part.each_piece(piece, (jnp.int32(0), jnp.int32(0)))

        @pl.loop(epilogue.outputs.part.index, part.lens_ref.shape[0] * kv_heads, step=parts)
        def _each_empty_pair(pair):
            @pl.when((part.pages_of(pair) <= 0) & (wg == 0))
            def _():
                write_nothing(epilogue.outputs, pair)

    def body(first_rows, *every):
        refs = iter(every)
        q_ref, kv_ref, layer_ref, table_ref, lens_ref, cuts_ref = (next(refs) for _ in range(6))
        order_ref: Any = next(refs) if ordered else None
        query_lens_ref: Any = next(refs) if ragged else None
        sinks_ref: Any = next(refs) if sinks else None
        gate_ref: Any = next(refs) if gated else None
        factors_ref: Any = next(refs) if fp8 else None
        value_scale_ref: Any = next(refs) if fp8 else None
        out_ref = next(refs)
        partial_ref: Any = next(refs) if split else None
        lse_ref = next(refs)
        partial_lse_ref: Any = next(refs) if split else None
        memory = Memory(*refs)
        wg, tile, index = (lax.axis_index(name) for name in ("wg", "tile", "part"))
        begin, end = ((cuts_ref[0, i], cuts_ref[1, i]) for i in (index, index + 1))
        part = Pairs(
            begin, end, lens_ref, table_ref, kv_ref, layer_ref[0], index, order_ref,
            kv_heads, head_dim, q_len, window, query_lens_ref,
        )  # fmt: skip
        mine = pl.ds(tile * columns, columns)
        outputs = Outputs(
            part, first_rows, out_rows, head_dim, mine, out_ref, partial_ref, lse_ref,
            partial_lse_ref,
        )  # fmt: skip
        epilogue = Epilogue(
            wg, memory, outputs, sinks_ref, gate_ref, tiles, value_scale_ref, interpret
        )

        @pl.when(wg == CONSUMERS)
        def _produce():
            if many_registers:
                plgpu.set_max_registers(40, action="decrease")
            produce(part, q_ref, mine, memory)

        @pl.when(wg < CONSUMERS)
        def _consume():
            if many_registers:
                plgpu.set_max_registers(232, action="increase")
            consume(part, wg, tile * columns, epilogue, factors_ref)

    return body
