"""The body of `mla_decode_columns`: two warpgroups that take a row's pages in turns.

Heads are the columns of both products, so that a few of them cost a few columns:

    scores^T [64 tokens, N] = K Q^T          K [64, 576] in shared memory
    out^T    [512, N]      += V^T P^T        V the same 64 tokens, seen transposed

The softmax runs over the scores turned round through shared memory, so that a head's lie in half a
warp; P goes back the same way. Each warpgroup has maxima, sums and an output of its own, and the
two meet at the end of a row's piece, in shared memory again.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper import swizzled
from jaxattn.kernels.mla_body import EMPTY, LOG2E, MASKED, RANK, ROPE, copies_of
from jaxattn.kernels.mla_latents import BLOCKS, Latents
from jaxattn.kernels.mla_schedule import PAGE
from jaxattn.mla_cache import BLOCK

WARPGROUPS = 2
# Beside a row of scores or of the output, so that the columns of neighbours lie in other banks.
MARGIN = 4


def _layout(tiles: Any, warps: int, *lanes: int) -> Any:
    tiling = plgpu.Tiling(tiles)
    return plgpu.Layout.TILED(tiling, warp_dims=(warps,), lane_dims=lanes, vector_dim=-1)


# Registers of scores [N, 64] and of outputs [n, 512], four numbers a thread: half a warp has a row
# of scores, a warp 128 columns of an output's row.
SCORES = _layout(((8, PAGE), (2, PAGE), (4,)), -5, -3, -2)
OUTPUTS = _layout(((4, 128), (4,)), -3, -2)


def scratch_types(dtype: Any, columns: int, page_size: int, quantized: bool) -> list[Any]:
    tiles = swizzled(dtype)
    pages = plgpu.SMEM((WARPGROUPS, PAGE, RANK), dtype, transforms=tiles)
    outputs = plgpu.SMEM((WARPGROUPS, columns, RANK + MARGIN), jnp.float32)
    types = [
        plgpu.RefUnion(pages, outputs),  # a piece's pages, then its two outputs
        plgpu.SMEM((WARPGROUPS, PAGE, ROPE), dtype, transforms=tiles),
        plgpu.SMEM((columns, RANK), dtype, transforms=tiles),  # Q
        plgpu.SMEM((columns, ROPE), dtype, transforms=tiles),  # its rope columns
        plgpu.SMEM((WARPGROUPS, columns, PAGE + MARGIN), jnp.float32),  # scores
        plgpu.SMEM((WARPGROUPS, columns, PAGE), dtype, transforms=tiles),  # P
        plgpu.SMEM((WARPGROUPS, columns), jnp.float32),  # rescaling of the columns
        plgpu.SMEM((WARPGROUPS, columns), jnp.float32),  # their maxima
        plgpu.SMEM((WARPGROUPS, columns), jnp.float32),  # their sums
        plgpu.Barrier(num_arrivals=2),  # Q loaded
        plgpu.Barrier(num_arrivals=WARPGROUPS),  # both warpgroups are there
    ]
    if quantized:
        return [*types, plgpu.SMEM((WARPGROUPS, BLOCKS, PAGE), jnp.float32)]  # scales
    copies = 2 * copies_of(page_size)
    return [*types, plgpu.Barrier(num_arrivals=copies, num_barriers=WARPGROUPS)]  # page loaded


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
    piece_pages: int,
    cache_dtype: Any,
    quantized: bool,
    per_tensor: bool,
    split: bool,
    ragged: bool,
    interpret: bool,
) -> Any:
    """The kernel's function of (first rows of the lanes, *refs in `mla_decode_columns`'s order).

    Args:
        columns: N, packed rows (query token, head) of a block.
        out_rows: packed rows that the output keeps of a request.
        page_size: tokens of a page of the cache; a "page" below is 64 tokens.
        piece_pages: `Schedule.piece`.
        quantized: whether the cache is FP8; `per_tensor`: with one scale for all of it.
        split: whether there are partial results.
        ragged: whether rows have lengths of their own among the S tokens.
    """
    product_layout = plgpu.Layout.WGMMA
    by_row, by_column = SCORES.reduce(1), product_layout.reduce(0)
    copies, tokens = copies_of(page_size), min(page_size, PAGE)
    latents = Latents(cache_dtype, tokens, interpret)

    def over_keys(vector: jax.Array) -> jax.Array:
        """Of each packed row, for its scores."""
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, (columns, PAGE), [0]), SCORES)

    def over_out(vector: jax.Array) -> jax.Array:
        """Of each column, for a block of its output."""
        wide = lax.broadcast_in_dim(vector, (BLOCK, columns), [1])
        return plgpu.layout_cast(wide, product_layout)

    def iota(dimension: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (columns, PAGE), dimension, layout=SCORES)

    def store_turned(target: Any, value: jax.Array) -> None:
        if interpret:
            target[...] = value.T
        else:
            value = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
            target.transpose((1, 0))[...] = value

    def body(first_rows, *every):
        refs = iter(every)
        q_ref, kv_ref, layer_ref, table_ref, lens_ref, cuts_ref = (next(refs) for _ in range(6))
        kv_scale_ref: Any = next(refs) if per_tensor else None
        query_lens_ref: Any = next(refs) if ragged else None
        out_ref = next(refs)
        partial_ref: Any = next(refs) if split else None
        lse_ref = next(refs)
        partial_lse_ref: Any = next(refs) if split else None
        (
            (kv_smem, sum_smem), rope_smem, q_smem, q_rope_smem, score_smem, p_smem, rescale_smem,
            top_smem, total_smem, q_loaded, both_there, last,
        ) = refs  # fmt: skip
        batch = lens_ref.shape[0]
        max_pages = -(-table_ref.shape[1] * page_size // PAGE)
        wg, tile, part = lax.axis_index("wg"), lax.axis_index("tile"), lax.axis_index("part")
        first_row, first_page = cuts_ref[0, part], cuts_ref[1, part]
        last_row, last_page = cuts_ref[0, part + 1], cuts_ref[1, part + 1]
        kv_scale = kv_scale_ref[0] if per_tensor else 1.0
        factor = kv_scale * (scale * LOG2E)
        mine = pl.ds(tile * columns, columns)
        kv, rope = kv_smem.at[wg], rope_smem.at[wg]

        def meet() -> None:
            """The two warpgroups wait for each other, and see what each has written."""
            plgpu.commit_smem()
            plgpu.barrier_arrive(both_there)
            plgpu.barrier_wait(both_there)

        def pages_of(row: jax.Array) -> jax.Array:
            return jnp.minimum(lax.div(lens_ref[row] + PAGE - 1, PAGE), max_pages)

        def partial_slot(row: jax.Array, start: jax.Array) -> jax.Array:
            if piece_pages:
                return row * (-(-max_pages // piece_pages)) + lax.div(start, piece_pages)
            return 2 * part + (row != first_row).astype(jnp.int32)

        def places(row: jax.Array, page: jax.Array, stop: jax.Array) -> list[jax.Array]:
            """Where in the cache the page is; from `stop` on, the row's last one."""
            page = jnp.minimum(page, stop - 1)
            if page_size == PAGE:
                return [table_ref[row, page]]
            # Past the row's last page of the cache, that page again: what is read is masked.
            end = lax.div(lens_ref[row] + page_size - 1, page_size) - 1
            end = jnp.minimum(end, table_ref.shape[1] - 1)
            first = lax.div(page * PAGE, page_size)
            return [table_ref[row, jnp.minimum(first + j, end)] for j in range(copies)]

        def sources(numbers: list[jax.Array], page: jax.Array, stop: jax.Array) -> list[Any]:
            page = jnp.minimum(page, stop - 1)
            inside = lax.rem(page, page_size // PAGE) * PAGE if page_size > PAGE else 0
            some = pl.ds(inside, tokens)
            return [kv_ref.at[layer_ref[0], number, some] for number in numbers]

        def load(numbers: list[jax.Array], page: jax.Array, stop: jax.Array) -> None:
            for j, source in enumerate(sources(numbers, page, stop)):
                for first, width, target in ((0, RANK, kv), (RANK, ROPE, rope)):
                    to = target.at[pl.ds(j * tokens, tokens)]
                    plgpu.copy_gmem_to_smem(source.at[:, pl.ds(first, width)], to, last.at[wg])

        def fetch(step: int, numbers: list[jax.Array], page: jax.Array, stop: jax.Array) -> Any:
            return [latents.fetch(source, step) for source in sources(numbers, page, stop)]

        def unpack(step: int, fetched: Any, kv: Any, rope: Any) -> None:
            for j, some in enumerate(fetched):
                at = pl.ds(j * tokens, tokens)
                latents.unpack(some, step, kv.at[at], rope.at[at], last.at[wg, :, at])

        def piece(row: jax.Array, start: jax.Array, steps: jax.Array) -> None:
            stop = start + steps

            @pl.when(wg == 0)
            def _load_queries():
                for first, width, target in ((0, RANK, q_smem), (RANK, ROPE, q_rope_smem)):
                    some = q_ref.at[row, mine, pl.ds(first, width)]
                    plgpu.copy_gmem_to_smem(some, target, q_loaded)

            first = start + wg
            taken = lax.div(steps + 1 - wg, WARPGROUPS)
            numbers = places(row, first, stop)
            if not quantized:
                pl.when(taken > 0)(lambda: load(numbers, first, stop))

            # Keys that each packed row sees: causal from the bottom right.
            length = lens_ref[row]
            queries = query_lens_ref[row] if ragged else q_len
            packed_row = tile * columns + iota(0)
            visible = plgpu.layout_cast(
                jnp.full((columns, PAGE), length - (queries - 1), jnp.int32), SCORES
            )
            for token in range(1, q_len):
                visible += (packed_row >= token * num_heads).astype(jnp.int32)
            if ragged:
                visible = jnp.where(packed_row < queries * num_heads, visible, 0)
            plgpu.barrier_wait(q_loaded)

            def place_of(numbers: list[jax.Array]) -> tuple[Any, Any]:
                # Were the slot known to stay the same, the compiler would keep 68 descriptors of
                # its tiles in registers. A page's number has no sign.
                slot = wg + lax.shift_right_logical(numbers[0], 31)
                slot = jnp.minimum(slot, WARPGROUPS - 1)
                return kv_smem.at[slot], rope_smem.at[slot]

            def product(ref: Any, of_keys: Any, of_queries: Any) -> None:
                plgpu.wgmma(ref, of_keys, of_queries.transpose((1, 0)))

            def scores_of_loaded(ref: Any, kv: Any, rope: Any) -> jax.Array:
                plgpu.barrier_wait(last.at[wg])
                product(ref, kv, q_smem)
                product(ref, rope, q_rope_smem)
                return ref[...]

            def scores_of_fetched(
                ref: Any, kv: Any, rope: Any, fetched: Any, numbers: Any, following: jax.Array
            ) -> Any:
                """Scores of the page in registers, where page `following` takes its place.

                A block is widened while the products run: of the blocks before it, and of the page
                before with its values, of which this block may take the place of one that is done.
                """

                def score(step: int) -> None:
                    if step == 0:
                        product(ref, rope, q_rope_smem)
                    else:
                        block = pl.ds((step - 1) * BLOCK, BLOCK)
                        product(ref, kv.at[:, block], q_smem.at[:, block])

                after = []
                for step, some in enumerate(fetched):
                    if step > 0 and not interpret:
                        # Begun since this block's values were taken: the other blocks' products
                        # with values and the scores of the steps but the last, BLOCKS - 1 of them.
                        plgpu.wgmma_wait(BLOCKS - 1)
                    plgpu.commit_smem()  # for all four warps, and what the last step wrote
                    if step > 0:
                        score(step - 1)
                    unpack(step, some, kv, rope)
                    after.append(fetch(step, numbers, following, stop))
                plgpu.commit_smem()
                score(latents.STEPS - 1)
                return after

            def soften(i, top, total, scores):
                """P and the rescaling of page i, to shared memory."""
                page = first + WARPGROUPS * i
                here = score_smem.at[wg, :, pl.ds(0, PAGE)]
                store_turned(here, scores)
                plgpu.commit_smem()

                # What lies past the end of the sequence may be NaN, and 0 * NaN is NaN: it becomes
                # 0 before it is used as a value. As keys it has been read.
                left = length - page * PAGE

                @pl.when(left < PAGE)
                def _clear_tail():
                    for start in range(0, RANK, ROPE):
                        some = kv.at[:, pl.ds(start, ROPE)]
                        inside = plgpu.broadcasted_iota(
                            jnp.int32, (PAGE, ROPE), 0, layout=product_layout
                        )
                        kept = plgpu.load(some, layout=product_layout)
                        some[...] = jnp.where(inside < left, kept, jnp.zeros((), dtype))

                scores = plgpu.load(here, layout=SCORES, optimized=False) * factor
                scores = jnp.where(iota(1) + page * PAGE < visible, scores, MASKED)
                new_top = jnp.maximum(top, scores.max(axis=1))
                p = jnp.exp2(scores - over_keys(new_top))
                rescale = jnp.exp2(top - new_top)
                p_smem[wg] = p.astype(dtype)
                rescale_smem[wg] = rescale
                plgpu.commit_smem()
                return new_top, total * over_keys(rescale) + p

            def add_values(refs: Any, accs: tuple[jax.Array, ...], kv: Any) -> Any:
                """The output so far rescaled, and P V begun: of each block on its own."""
                rescale = over_out(plgpu.load(rescale_smem.at[wg], layout=by_column))
                p = p_smem.at[wg].transpose((1, 0))
                accs = tuple(acc * rescale for acc in accs)
                if interpret:
                    wide = lambda x: x[...].astype(jnp.float32)  # noqa: E731
                    values = wide(kv)
                    return tuple(
                        acc + jnp.dot(values[:, i * BLOCK : (i + 1) * BLOCK].T, wide(p))
                        for i, acc in enumerate(accs)
                    )
                for ref, acc in zip(refs, accs, strict=True):
                    ref[...] = acc
                for i, ref in enumerate(refs):
                    plgpu.wgmma(ref, kv.at[:, pl.ds(i * BLOCK, BLOCK)].transpose((1, 0)), p)
                return refs

            def finished(accs: Any) -> tuple[jax.Array, ...]:
                return tuple(accs) if interpret else tuple(ref[...] for ref in accs)

            def values_alone(accs: tuple[jax.Array, ...], kv: Any) -> tuple[jax.Array, ...]:
                return with_refs(lambda *refs: finished(add_values(refs, accs, kv)))

            def with_refs(run: Any) -> Any:
                return run() if interpret else pl.run_scoped(run, *[out_type] * BLOCKS)

            def step_of_loaded(i, carry):
                top, total, accs, numbers = carry
                kv, rope = place_of(numbers)
                run = functools.partial(scores_of_loaded, kv=kv, rope=rope)
                top, total = soften(i, top, total, pl.run_scoped(run, scores_type))
                accs = values_alone(accs, kv)
                plgpu.commit_smem()  # all four warps have read the page
                page = first + WARPGROUPS * (i + 1)
                pl.when(i < taken - 1)(lambda: load(numbers, page, stop))
                return top, total, accs, places(row, page + WARPGROUPS, stop)

            def step_of_fetched(i, carry):
                top, total, accs, scores, fetched, numbers = carry
                kv, rope = place_of(numbers)
                top, total = soften(i, top, total, scores)
                page = first + WARPGROUPS * (i + 2)

                def both(score_ref: Any, *refs: Any) -> Any:
                    begun = add_values(refs, accs, kv)
                    after = scores_of_fetched(score_ref, kv, rope, fetched, numbers, page)
                    return score_ref[...], after, finished(begun)

                scores, fetched, accs = with_refs(
                    lambda *refs: pl.run_scoped(lambda ref: both(ref, *refs), scores_type)
                )
                return top, total, accs, scores, fetched, places(row, page + WARPGROUPS, stop)

            def last_step(i, carry):
                top, total, accs, scores = carry
                top, total = soften(i, top, total, scores)
                return top, total, values_alone(accs, kv), scores

            scores_type = plgpu.ACC((PAGE, columns), jnp.float32)
            out_type = plgpu.ACC((BLOCK, columns), jnp.float32)
            nothing = plgpu.layout_cast(jnp.zeros((BLOCK, columns), jnp.float32), product_layout)
            sums = (
                plgpu.layout_cast(jnp.full((columns,), EMPTY, jnp.float32), by_row),
                plgpu.layout_cast(jnp.zeros((columns, PAGE), jnp.float32), SCORES),
                (nothing,) * BLOCKS,
            )
            following = places(row, first + WARPGROUPS, stop)
            if quantized:

                def first_scores(ref: Any) -> Any:
                    some = [fetch(step, numbers, first, stop) for step in range(latents.STEPS)]
                    after = scores_of_fetched(ref, kv, rope, some, following, first + WARPGROUPS)
                    return ref[...], after

                scores, fetched = pl.run_scoped(first_scores, scores_type)
                after = places(row, first + 2 * WARPGROUPS, stop)
                carry: Any = (*sums, scores, fetched, after)
                carry = lax.fori_loop(0, taken - 1, step_of_fetched, carry)
                start_of_last = jnp.maximum(taken - 1, 0)
                carry = lax.fori_loop(start_of_last, taken, last_step, carry[:4])
            else:
                carry = lax.fori_loop(0, taken, step_of_loaded, (*sums, following))
            top, total, accs = carry[:3]
            top_smem[wg], total_smem[wg] = top, total.sum(axis=1)
            meet()
            merge(row, start, steps, accs)

        def merge(
            row: jax.Array, start: jax.Array, steps: jax.Array, accs: tuple[jax.Array, ...]
        ) -> None:
            """Both warpgroups' results in one, written to the output or as a partial result."""
            whole = steps == pages_of(row)

            def merged(layout: Any) -> tuple[Any, Any]:
                """Maximum and sum of each column."""
                tops = [plgpu.load(top_smem.at[i], layout=layout) for i in range(WARPGROUPS)]
                totals = [plgpu.load(total_smem.at[i], layout=layout) for i in range(WARPGROUPS)]
                top = functools.reduce(jnp.maximum, tops)
                parts = [n * jnp.exp2(t - top) for n, t in zip(totals, tops, strict=True)]
                return top, functools.reduce(jnp.add, parts)

            # A NaN total is not 0: a NaN among a row's own keys shows in its output. Of a row that
            # sees no key the product is 0 * V, NaN where V is.
            top, total = merged(by_column)
            own = plgpu.load(top_smem.at[wg], layout=by_column)
            share = jnp.where(total == 0, -1.0, jnp.exp2(own - top) / total)
            share = over_out(share)
            for i, acc in enumerate(accs):
                mine_of_it = jnp.where(share < 0, 0.0, acc * share * kv_scale)
                store_turned(sum_smem.at[wg, :, pl.ds(i * BLOCK, BLOCK)], mine_of_it)
            meet()
            half = columns // WARPGROUPS
            some = pl.ds(wg * half, half)
            shares = [
                plgpu.load(sum_smem.at[i, some, pl.ds(0, RANK)], layout=OUTPUTS, optimized=False)
                for i in range(WARPGROUPS)
            ]
            out = functools.reduce(jnp.add, shares)
            at = tile * columns + wg * half

            @pl.when(whole)
            def _():
                first = first_rows[0] + row * out_rows + at
                out_ref[pl.ds(first, half), :] = out.astype(dtype)

            if split:

                @pl.when(jnp.logical_not(whole))
                def _():
                    first = first_rows[1] + partial_slot(row, start) * out_rows + at
                    partial_ref[pl.ds(first, half), :] = out

            @pl.when(wg == 0)
            def _lse():
                top, total = merged(by_row)
                lse = (top + jnp.log2(total)) * (1 / LOG2E)
                lse = jnp.where(total == 0, -jnp.inf, lse)

                @pl.when(whole)
                def _():
                    lse_ref[row, mine] = lse

                if split:

                    @pl.when(jnp.logical_not(whole))
                    def _():
                        partial_lse_ref[partial_slot(row, start), mine] = lse

            meet()

        rows = last_row - first_row + (last_page > 0).astype(jnp.int32)

        @pl.loop(0, rows)
        def _each_row(i):
            row = first_row + i
            start = jnp.where(i == 0, first_page, 0)
            # No further than the row: it may have shrunk since the schedule was made.
            pages = pages_of(row)
            stop = jnp.where(row == last_row, jnp.minimum(last_page, pages), pages)
            steps = jnp.maximum(stop - start, 0)
            if piece_pages:

                @pl.loop(0, lax.div(steps + piece_pages - 1, piece_pages))
                def _each_piece(j):
                    done = j * piece_pages
                    piece(row, start + done, jnp.minimum(steps - done, piece_pages))
            else:
                pl.when(steps > 0)(lambda: piece(row, start, steps))

        @pl.loop(part, batch, step=parts)
        def _each_empty_row(row):
            @pl.when((pages_of(row) <= 0) & (wg == 0))
            def _():
                first = first_rows[0] + row * out_rows + tile * columns
                nothing = plgpu.layout_cast(jnp.zeros((columns, RANK), dtype), OUTPUTS)
                out_ref[pl.ds(first, columns), :] = nothing
                lse_ref[row, mine] = plgpu.layout_cast(jnp.full((columns,), -jnp.inf), by_row)

    return body
