"""The body of `mla_decode_columns`: two warpgroups that take a row's pages in turns.

Heads are the columns of both products, so that a few of them cost a few columns:

    scores^T [64 tokens, N] = K Q^T          K [64, 576] in shared memory
    out^T    [512, N]      += V^T P^T        V the same 64 tokens, seen transposed

The softmax runs over the scores turned round through shared memory, so that a head's lie in half a
warp; P goes back the same way. Each warpgroup has maxima, sums and an output of its own, and at
the end of a row's piece columns_merge.py makes one result of the two.

Pages come by TMA as they are stored. K and V of a 16-bit cache are read by wgmma where they lie;
those of an FP8 one are widened on their way through registers, by fp8_fragments.py, without their
scales. Those of a block of a token multiply its scores, which so are a product a block, and its P,
of which so there is one a block:

    scores^T = rope + sum_b s_b (K_b Q_b^T)          out_b^T += V_b^T (s_b P / unit)^T

The unit, a power of two, is 2**-14 of the largest scale so far, or down to half of that, and the
output is rescaled when it grows. In float16 a token's share is so kept to 2**-39 of that scale.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.formats import BLOCK, LatentFormat
from jaxattn.kernels.hopper.turned import store_turned
from jaxattn.kernels.mla_decode.columns_memory import (
    BY_COLUMN,
    BY_ROW,
    DEPTH,
    SCORES,
    TILES,
    WARPGROUPS,
    over_out,
)
from jaxattn.kernels.mla_decode.columns_merge import Outputs, Shared, merge
from jaxattn.kernels.mla_decode.fp8_fragments import BLOCKS, Fragments, unknown_zero
from jaxattn.kernels.mla_decode.fp8_interpreted import (
    half_queries,
    plain_numbers,
    plain_scales,
    plain_scores,
)
from jaxattn.kernels.mla_decode.part import Part, Place, visible_keys
from jaxattn.kernels.mla_decode.rows_scores import EMPTY, LOG2E, MASKED
from jaxattn.kernels.mla_decode.rows_values import RANK, ROPE
from jaxattn.kernels.mla_decode.schedule import PAGE

# Blocks whose values are widened while the scores are exchanged, 32 registers each.
AHEAD = 3
# FP8: P is float16, and this leaves it room below 1, and above, as the largest scale may be nearly
# twice the power of two that is taken for it.
ROOM = 2.0**14
# Of block scales; smaller ones share a unit, for which float16 has room.
LEAST_UNIT = 2.0**-114


def _next_unit(unit: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A power of two, at least `largest` / 2 / ROOM, and 1 / that."""
    bits = lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    power = lax.bitcast_convert_type(bits, jnp.float32)
    unit = jnp.maximum(unit, power * (1 / ROOM))
    bits = (254 << 23) - lax.bitcast_convert_type(unit, jnp.int32)
    return unit, lax.bitcast_convert_type(bits, jnp.float32)


def make_body(
    *,
    q_len: int,
    num_heads: int,
    columns: int,
    out_rows: int,
    parts: int,
    scale: float,
    dtype: Any,
    page_size: int,
    quantized: bool,
    per_tensor: bool,
    rope: bool,
    split: bool,
    ordered: bool,
    ragged: bool,
    interpret: bool,
) -> Any:
    """The kernel's function of (first rows of the lanes, *refs in `mla_decode_columns`'s order).

    Args:
        columns: N, packed rows (query token, head) of a block.
        out_rows: packed rows that the output keeps of a request.
        page_size: tokens of a page of the cache; a "page" below is 64 tokens.
        quantized: whether the cache is FP8; `per_tensor`: with one scale for all of it.
        rope: whether a latent has rotated dims behind its 512.
        split: whether there are partial results.
        ordered: whether the schedule has an order.
        ragged: whether rows have lengths of their own among the S tokens.
    """
    product_layout = plgpu.Layout.WGMMA
    tokens = min(page_size, PAGE)
    # Where a copy of queries or of a page begins, and its width.
    pieces = ((0, RANK), (RANK, ROPE))[: 1 + rope]

    def over_keys(vector: jax.Array) -> jax.Array:
        """Of each packed row, for its scores."""
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, (columns, PAGE), [0]), SCORES)

    def iota(dimension: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (columns, PAGE), dimension, layout=SCORES)

    def body(first_rows, *every):
        refs = iter(every)
        q_ref, kv_ref, layer_ref, table_ref, lens_ref, cuts_ref = (next(refs) for _ in range(6))
        order_ref: Any = next(refs) if ordered else None
        kv_scale_ref: Any = next(refs) if per_tensor else None
        query_lens_ref: Any = next(refs) if ragged else None
        out_ref = next(refs)
        partial_ref: Any = next(refs) if split else None
        lse_ref = next(refs)
        partial_lse_ref: Any = next(refs) if split else None
        (
            (kv_smem, sum_smem), rope_smem, q_refs, q_rope_refs,
            score_smem, p_smem, stats_smem, q_loaded, both_there, loaded,
        ) = refs  # fmt: skip
        q_loads, q_smem = q_refs if quantized else (q_refs, q_refs)
        q_rope_loads, q_rope_smem = q_rope_refs if quantized else (q_rope_refs, q_rope_refs)
        rescale_smem = stats_smem.at[0]
        q_factor_smem = stats_smem.at[3, 0]
        wg, tile, part_index = (lax.axis_index(name) for name in ("wg", "tile", "part"))
        part = Part.of(cuts_ref, order_ref, part_index, lens_ref, table_ref, kv_ref, layer_ref)
        kv_scale = kv_scale_ref[0] if per_tensor else 1.0
        factor = kv_scale * (scale * LOG2E)
        mine = pl.ds(tile * columns, columns)
        # At a piece's end, in the place of its rescaling and its pages: units and outputs.
        tops, totals, units = (stats_smem.at[i] for i in (1, 2, 0))
        shared = Shared(wg, both_there, tops, totals, units, sum_smem)
        outputs = Outputs(
            part, first_rows, out_rows, mine, out_ref, partial_ref, lse_ref, partial_lse_ref
        )
        # Of the page that a warpgroup has, the 512 numbers of each token, and the rotated ones.
        page_smem: Any = None if quantized else [x.at[wg] for x in (kv_smem, rope_smem)[: 1 + rope]]
        fragments: Any = Fragments(kv_ref.dtype) if quantized else None
        latents = LatentFormat(kv_ref.dtype)
        versions = p_smem.shape[1]
        # Many columns leave room for a block's 32 registers, and not for the next one's.
        lag = 0 if latents.block_scaled and columns > 16 else 1
        blocks_ahead = AHEAD if columns <= 16 and not interpret else 0

        def load(numbers: list[jax.Array], page: jax.Array) -> None:
            for j, source in enumerate(part.sources(numbers, page)):
                for (first, width), target in zip(pieces, page_smem, strict=True):
                    to = target.at[pl.ds(j * tokens, tokens)]
                    plgpu.copy_gmem_to_smem(source.at[:, pl.ds(first, width)], to, loaded.at[wg])

        def load_fp8(numbers: list[jax.Array], page: jax.Array, slot: jax.Array | int) -> None:
            there = loaded.at[wg, slot]
            for j, source in enumerate(part.sources(numbers, page)):
                some = pl.ds(j * tokens, tokens)
                if latents.block_scaled:
                    # One piece of memory. In boxes of 128 bytes, of which most of a token's 656
                    # lie across two lines, TMA would read twice as often.
                    to = kv_smem.at[wg, slot, some]
                    plgpu.copy_gmem_to_smem(source, to, there, oob_mode=plgpu.OOBFillMode.UNDEFINED)
                    continue
                for block in range(TILES):
                    # The 64 rope numbers come with the 64 before them.
                    first = block * BLOCK if block < BLOCKS else RANK + ROPE - BLOCK
                    to = kv_smem.at[wg, slot, block, some]
                    plgpu.copy_gmem_to_smem(source.at[:, pl.ds(first, BLOCK)], to, there)

        def piece(place: Place, start: jax.Array, steps: jax.Array, carry: Any) -> Any:
            row, stop = place.row, start + steps

            @pl.when(wg == 0)
            def _load_queries():
                for (begin, width), target in zip(pieces, (q_loads, q_rope_loads), strict=False):
                    some = q_ref.at[row, mine, pl.ds(begin, width)]
                    plgpu.copy_gmem_to_smem(some, target.at[0], q_loaded)

            first = start + wg
            taken = lax.div(steps + 1 - wg, WARPGROUPS)
            if quantized:
                for k in range(DEPTH):
                    page = first + k * WARPGROUPS
                    some = part.numbers(row, page, stop)
                    pl.when(taken > k)(functools.partial(load_fp8, some, page, k))
            else:
                numbers = part.numbers(row, first, stop)
                pl.when(taken > 0)(lambda: load(numbers, first))

            length = lens_ref[row]
            queries = query_lens_ref[row] if ragged else None
            visible = visible_keys(
                tile * columns + iota(0), length, queries,
                q_len=q_len, num_heads=num_heads, layout=SCORES,
            )  # fmt: skip
            plgpu.barrier_wait(q_loaded)
            of_rows: Any = factor
            if quantized:
                if interpret:
                    both = jnp.concatenate([q_loads[0], q_rope_loads[0]], axis=1)
                    *plain_queries, of_rows = half_queries(both, latents.block_scaled)
                else:
                    fragments.halve_queries(q_loads.at[0], q_rope_loads.at[0], q_factor_smem, wg)
                    shared.meet()
                    of_rows = plgpu.load(q_factor_smem, layout=BY_ROW, optimized=False)
                of_rows = over_keys(of_rows * factor)

            def place_of(zero: jax.Array) -> tuple[Any, Any]:
                # Were the slot known to stay the same, the compiler would keep 68 descriptors of
                # its tiles in registers.
                slot = jnp.minimum(wg + zero, WARPGROUPS - 1)
                return kv_smem.at[slot], rope_smem.at[slot] if rope else None

            def product(ref: Any, of_keys: Any, of_queries: Any) -> None:
                plgpu.wgmma(ref, of_keys, of_queries.transpose((1, 0)))

            def scores_of(ref: Any, kv: Any, rotated: Any) -> jax.Array:
                plgpu.barrier_wait(loaded.at[wg])
                product(ref, kv, q_smem.at[0])
                if rope:
                    product(ref, rotated, q_rope_smem.at[0])
                return ref[...]

            def fp8_scores_of(*refs: Any, slot: jax.Array) -> jax.Array:
                """With scales the rope's product and each block's have a `ref` each."""
                page = kv_smem.at[wg, slot]
                zero = unknown_zero()
                product(refs[0], fragments.rope(page), q_rope_smem.at[zero])
                scores: Any = None

                def add(i: int, running: int) -> jax.Array:
                    done = plgpu.wgmma_accumulator_load(refs[i], wait_n=running)
                    return done if i == 0 else fragments.plus_scaled(scores, done, page, i - 1)

                for i in range(BLOCKS):
                    keys = fragments.keys(page, i)
                    queries = q_smem.at[zero, :, pl.ds(i * BLOCK, BLOCK)]
                    product(refs[1 + i if latents.block_scaled else 0], keys, queries)
                    if latents.block_scaled:
                        scores = add(i, 1)
                        if lag == 0 and i < BLOCKS - 1:
                            plgpu.wgmma_wait(0)
                    else:
                        plgpu.wgmma_wait(1)
                return add(BLOCKS, 0) if latents.block_scaled else refs[0][...]

            def scales_of(slot: jax.Array, unit: jax.Array, left: jax.Array) -> Any:
                """Of each block the scales of the scores' tokens, and the largest for each row."""
                if not interpret:
                    here = kv_smem.at[wg, slot]
                    return fragments.scales_of_keys(here, score_smem.at[wg], iota(1), unit, SCORES)
                inside = jnp.arange(PAGE)[:, None] < left
                numbers = jnp.where(inside, plain_scales(kv_smem[wg, slot]), 0)
                wide = [jnp.broadcast_to(x, (columns, PAGE)) for x in numbers.T]
                return wide, jnp.full_like(unit, jnp.nanmax(numbers))

            def soften(i, top, total, scores, meanwhile=lambda: None):
                """Maxima and sums, page i's P and rescaling, and what was done meanwhile."""
                page = first + WARPGROUPS * i
                here = score_smem.at[wg, :, pl.ds(0, PAGE)]
                store_turned(here, scores, interpret=interpret)
                plgpu.commit_smem()

                # What lies past the end of the sequence may be NaN, and 0 * NaN is NaN: it becomes
                # 0 before it is used as a value. As keys it has been read (of an FP8 page, whose
                # keys are in registers, it became 0 before that).
                left = length - page * PAGE
                if not quantized:

                    @pl.when(left < PAGE)
                    def _clear_tail():
                        for start in range(0, RANK, ROPE):
                            some = page_smem[0].at[:, pl.ds(start, ROPE)]
                            inside = plgpu.broadcasted_iota(
                                jnp.int32, (PAGE, ROPE), 0, layout=product_layout
                            )
                            kept = plgpu.load(some, layout=product_layout)
                            some[...] = jnp.where(inside < left, kept, jnp.zeros((), dtype))

                done = meanwhile()
                scores = plgpu.load(here, layout=SCORES, optimized=False) * of_rows
                scores = jnp.where(iota(1) + page * PAGE < visible, scores, MASKED)
                new_top = jnp.maximum(top, scores.max(axis=1))
                p = jnp.exp2(scores - over_keys(new_top))
                rescale = jnp.exp2(top - new_top)
                return new_top, total * over_keys(rescale) + p, p, rescale, done

            def rescaled(accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                rescale = over_out(plgpu.load(rescale_smem.at[wg], layout=BY_COLUMN))
                return tuple(acc * rescale for acc in accs)

            def of_p(version: int, zero: Any = 0) -> Any:
                return p_smem.at[wg + zero, version].transpose((1, 0))

            def add_values(
                refs: Any, accs: tuple[jax.Array, ...], p: jax.Array, rescale: jax.Array, kv: Any
            ) -> Any:
                """The output so far rescaled, and P V begun: of each block on its own."""
                p_smem[wg, 0] = p.astype(dtype)
                rescale_smem[wg] = rescale
                plgpu.commit_smem()
                accs = rescaled(accs)
                wide = lambda x: x[...].astype(jnp.float32)  # noqa: E731
                if interpret:
                    return tuple(
                        acc + jnp.dot(wide(kv)[:, i * BLOCK : (i + 1) * BLOCK].T, wide(of_p(0)))
                        for i, acc in enumerate(accs)
                    )
                for ref, acc in zip(refs, accs, strict=True):
                    ref[...] = acc
                for i, ref in enumerate(refs):
                    plgpu.wgmma(ref, kv.at[:, pl.ds(i * BLOCK, BLOCK)].transpose((1, 0)), of_p(0))
                return refs

            def add_fp8_values(
                refs: Any, accs: tuple[jax.Array, ...], p: jax.Array, rescale: jax.Array,
                scales: list[jax.Array] | None, begun: list[jax.Array], slot: jax.Array,
                left: jax.Array,
            ) -> Any:  # fmt: skip
                """The same of an FP8 page; with `scales`, each block has a P of its own."""
                rescale_smem[wg] = rescale
                count = BLOCKS if scales else 1
                zero = 0 if interpret else unknown_zero()
                if interpret:
                    inside = jnp.arange(PAGE)[:, None] < left
                    numbers, _ = plain_numbers(kv_smem[wg, slot])
                    numbers = jnp.where(inside, numbers, 0)
                for start in range(0, count, versions):
                    if start:
                        plgpu.wgmma_wait(0)
                        plgpu.commit_smem()  # all four warps' products have read P
                    for version in range(versions):
                        here = p * scales[start + version] if scales else p
                        p_smem[wg, version] = here.astype(jnp.float16)
                    plgpu.commit_smem()
                    if not start:
                        accs = rescaled(accs)
                        if not interpret:
                            for ref, acc in zip(refs, accs, strict=True):
                                ref[...] = acc
                    for i in range(start, start + versions) if scales else range(BLOCKS):
                        p_here = of_p(i - start if scales else 0, zero)
                        if interpret:
                            more = jnp.dot(numbers[i].T, p_here[...].astype(jnp.float32))
                            accs = (*accs[:i], accs[i] + more, *accs[i + 1 :])
                            continue
                        here = kv_smem.at[wg, slot]
                        values = begun[i] if i < len(begun) else fragments.values(here, i)
                        plgpu.wgmma(refs[i], values, p_here)
                        plgpu.wgmma_wait(lag)
                return accs if interpret else refs

            def with_values(add: Any, *args: Any) -> tuple[jax.Array, ...]:
                def run(*refs: Any) -> tuple[jax.Array, ...]:
                    begun = add(refs, *args)
                    return tuple(begun) if interpret else tuple(ref[...] for ref in begun)

                return run() if interpret else pl.run_scoped(run, *[out_type] * BLOCKS)

            def each_fp8_page(i, carry):
                top, total, unit, accs, numbers = carry
                slot = lax.rem(i, DEPTH)
                page = first + WARPGROUPS * i
                left = length - page * PAGE
                plgpu.barrier_wait(loaded.at[wg, slot])
                if interpret:
                    scores = plain_scores(kv_smem[wg, slot], *plain_queries)
                else:
                    # Before the scores are exchanged, and so before the tail is a value.
                    pl.when(left < PAGE)(lambda: fragments.clear(kv_smem.at[wg, slot], left))
                    if latents.block_scaled:
                        fragments.turn_scales(kv_smem.at[wg, slot], score_smem.at[wg])
                    run = functools.partial(fp8_scores_of, slot=slot)
                    count = 1 + BLOCKS * latents.block_scaled
                    scores = pl.run_scoped(run, *[scores_type] * count)
                values_of = lambda block: fragments.values(kv_smem.at[wg, slot], block)  # noqa: E731
                ahead = lambda: [values_of(block) for block in range(blocks_ahead)]  # noqa: E731
                top, total, p, rescale, begun = soften(i, top, total, scores, ahead)
                scales = None
                if latents.block_scaled:
                    scales, largest = scales_of(slot, unit, left)
                    old = unit
                    unit, inverse = _next_unit(unit, largest)
                    p *= over_keys(inverse)
                    rescale *= old * inverse
                else:
                    p *= ROOM
                accs = with_values(add_fp8_values, accs, p, rescale, scales, begun, slot, left)
                plgpu.commit_smem()  # all four warps have read the page
                later = page + WARPGROUPS * DEPTH
                pl.when(i < taken - DEPTH)(lambda: load_fp8(numbers, later, slot))
                return top, total, unit, accs, part.numbers(row, later + WARPGROUPS, stop)

            def each_page(i, carry):
                top, total, unit, accs, numbers = carry
                # 0, as numbers of pages and lengths have no sign.
                zero = lax.shift_right_logical(numbers[0], 31)
                kv, rotated = place_of(zero)
                run = functools.partial(scores_of, kv=kv, rotated=rotated)
                scores = pl.run_scoped(run, scores_type)
                top, total, p, rescale, _ = soften(i, top, total, scores)
                accs = with_values(add_values, accs, p, rescale, kv)
                page = first + WARPGROUPS * (i + 1)
                plgpu.commit_smem()  # all four warps have read the page
                pl.when(i < taken - 1)(lambda: load(numbers, page))
                return top, total, unit, accs, part.numbers(row, page + WARPGROUPS, stop)

            scores_type = plgpu.ACC((PAGE, columns), jnp.float32)
            out_type = plgpu.ACC((BLOCK, columns), jnp.float32)
            nothing = plgpu.layout_cast(jnp.zeros((BLOCK, columns), jnp.float32), product_layout)
            sums = (
                plgpu.layout_cast(jnp.full((columns,), EMPTY, jnp.float32), BY_ROW),
                plgpu.layout_cast(jnp.zeros((columns, PAGE), jnp.float32), SCORES),
                plgpu.layout_cast(jnp.full((columns,), LEAST_UNIT, jnp.float32), BY_ROW),
                (nothing,) * BLOCKS,
            )
            ahead = WARPGROUPS * (DEPTH if quantized else 1)
            following = part.numbers(row, first + ahead, stop)
            each = each_fp8_page if quantized else each_page
            ends = lax.fori_loop(0, taken, each, (*sums, following))
            top, total, unit, accs = ends[:4]
            tops[wg], totals[wg] = top, total.sum(axis=1)
            if latents.block_scaled:
                units[wg] = unit
            shared.meet()
            unit_of_all: Any = kv_scale / ROOM if quantized else 1.0
            merge(
                accs, None if latents.block_scaled else unit_of_all, shared, outputs,
                row, steps, as_values=quantized and not interpret, interpret=interpret,
            )  # fmt: skip
            return carry

        part.each_piece(piece)

        @pl.loop(part_index, lens_ref.shape[0], step=parts)
        def _each_empty_row(row):
            @pl.when((part.pages_of(row) <= 0) & (wg == 0))
            def _():
                outputs.write_nothing(row)

    return body
