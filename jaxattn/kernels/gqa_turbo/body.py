"""The body of `turbo_decode`: a warpgroup loads, and two or three take a part's steps in turns.

Packed rows (query token, head of the group) are the columns of both products, whose left operand
is codes turned into e4m3 numbers in registers:

    scores^T [64 tokens, 2 N] = K Q^T           K as codes; the tokens' norms multiply the scores
    out^T    [D, 2 N]         = V^T (s P)^T     V counted from the middle code

Q and s P, the probabilities times their tokens' scales, are two e4m3 terms each, which stand side
by side as columns. s P is divided by a unit per packed row and step, so that e4m3 has room for it;
the product is added to float32 sums, times that unit. What the middle codes stand for is a sum over
tokens alone, and joins the output at a piece's end. The rest is as in gqa_decode's body.py: a
step's place is free as soon as all warps have its codes in registers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.turboquant import TurboFormat
from jaxattn.kernels.gqa_decode.memory import QUERIES, over_out
from jaxattn.kernels.gqa_decode.merge import Epilogue, Outputs, merge, write_nothing
from jaxattn.kernels.gqa_turbo.fragments import Fragments, joined_terms, store_terms
from jaxattn.kernels.gqa_turbo.memory import REGISTERS, TERMS, Memory, room_of
from jaxattn.kernels.gqa_turbo.pairs import CodedPairs
from jaxattn.kernels.hopper.machine import meet
from jaxattn.kernels.hopper.turned import store_turned
from jaxattn.kernels.mla_decode.columns_memory import BY_COLUMN, BY_ROW, SCORES
from jaxattn.kernels.mla_decode.part import Place, visible_keys
from jaxattn.kernels.mla_decode.rows_scores import EMPTY, LOG2E, MASKED
from jaxattn.kernels.mla_decode.schedule import PAGE

PRODUCT = plgpu.Layout.WGMMA
# What the largest of a row's s P becomes; and what it is at least taken for, so that no float32
# number is divided by 0.
LARGEST_P, SMALLEST = 256.0, 1e-35
FEW_COLUMNS = 16  # whose sums of all dims are in registers beside the output
UNITS, MINIMA = 0, 1  # in `Memory.units`


def make_body(
    *,
    form: TurboFormat,
    q_len: int,
    group: int,
    kv_heads: int,
    columns: int,
    out_rows: int,
    parts: int,
    window: int | None,
    soft_cap: float | None,
    page_size: int,
    split: bool,
    ordered: bool,
    ragged: bool,
    sinks: bool,
    gated: bool,
    interpret: bool,
) -> Any:
    """The kernel's function of (first rows of the lanes, *refs in `turbo_decode_mosaic`'s order).

    Args:
        form: the cache's format.
        columns: N, packed rows s * group + j of a block.
        out_rows: packed rows that the output keeps of a pair.
        split: whether there are partial results.
        ordered: whether the schedule has an order.
        ragged: whether rows have lengths of their own among the S tokens.
        sinks, gated: whether there are such.
    """
    head_dim, room = form.head_dim, room_of(form, columns, page_size)
    consumers, ring, blocks = room.consumers, room.steps, head_dim // PAGE
    fragments = Fragments(form, room.pitch, interpret=interpret)

    def over_keys(vector: jax.Array) -> jax.Array:
        """Of each packed row, for its scores."""
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, (columns, PAGE), [0]), SCORES)

    def iota(dimension: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (columns, PAGE), dimension, layout=SCORES)

    def of_columns(ref: Any) -> jax.Array:
        """A number of each packed row, for its sums of 64 dims."""
        return over_out(plgpu.load(ref, layout=BY_COLUMN), PAGE)

    def place_of(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(warpgroup, its turn) of a part's step."""
        return lax.rem(step, consumers), lax.div(step, consumers)

    def produce(part: CodedPairs, q_ref: Any, tile: jax.Array, memory: Memory) -> None:
        mine = pl.ds(tile * (TERMS * columns), TERMS * columns)

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
                slot = lax.rem(turn, ring)
                free = functools.partial(plgpu.barrier_wait, memory.codes_read.at[wg, slot])
                pl.when(turn >= ring)(free)
                loaded = memory.codes_loaded.at[wg, slot]
                for some, to in part.copies(pair, numbers, start + i, memory.codes.at[wg, slot]):
                    plgpu.copy_gmem_to_smem(some, to, loaded)
                # A barrier tells odd rounds from even ones: no warp may be a round behind.
                meet(interpret=interpret)
                return following

            lax.fori_loop(0, steps, step, numbers)
            return number + 1, done + steps

        number, done = part.each_piece(piece, (jnp.int32(0), jnp.int32(0)))

        # What nobody waited for: the last steps of the rings, and the last queries.
        @pl.loop(jnp.maximum(done - consumers * ring, 0), done)
        def _drain(step):
            wg, turn = place_of(step)
            plgpu.barrier_wait(memory.codes_read.at[wg, lax.rem(turn, ring)])

        @pl.loop(jnp.maximum(number - QUERIES, 0), number)
        def _drain_queries(i):
            plgpu.barrier_wait(memory.queries_read.at[lax.rem(i, QUERIES)])

    def multiply(left: tuple[jax.Array, ...], right: Any) -> list[jax.Array]:
        """Blocks [64, K] times both terms [2 N, K] in shared memory: blocks [64, N]."""
        if interpret:
            both = right[...].astype(jnp.float32).T
            return [joined_terms(jnp.dot(block, both), interpret=True) for block in left]
        if columns > FEW_COLUMNS and len(left) > 1:  # one block's sums at a time
            return [product for block in left for product in multiply((block,), right)]

        def run(*refs: Any) -> list[jax.Array]:
            for ref, block in zip(refs, left, strict=True):
                plgpu.wgmma(ref, block, right.transpose((1, 0)))
            return [ref[...] for ref in refs]

        out_type = plgpu.ACC((PAGE, TERMS * columns), jnp.float32)
        products = pl.run_scoped(run, *[out_type] * len(left))
        return [joined_terms(product, interpret=False) for product in products]

    def consume(
        part: CodedPairs, wg: jax.Array, first_column: jax.Array, epilogue: Epilogue[Memory],
        memory: Memory, factors_ref: Any,
    ) -> None:  # fmt: skip
        scores_smem, p_smem = memory.scores.at[wg, :, pl.ds(0, PAGE)], memory.p.at[wg]
        rescale_smem = memory.stats.at[0, wg]
        units_smem, minima_smem = (memory.units.at[i, wg] for i in (UNITS, MINIMA))

        def piece(place: Place, start: jax.Array, steps: jax.Array, carry: Any) -> Any:
            number, done = carry
            pair = place.row
            length, queries = part.length_of(pair), part.queries_of(pair)
            first_token = (start + part.first_step_of(pair)) * PAGE
            of_rows = factors_ref.at[pair, epilogue.outputs.columns]
            factor = over_keys(plgpu.load(of_rows, layout=BY_ROW, optimized=False))
            visible = visible_keys(
                first_column + iota(0), length, queries,
                q_len=q_len, num_heads=group, layout=SCORES,
            )  # fmt: skip
            queries_at = lax.rem(number, QUERIES)
            plgpu.barrier_wait(memory.queries_loaded.at[queries_at])
            # The piece's steps that are this warpgroup's.
            first = lax.rem(wg + consumers - lax.rem(done, consumers), consumers)
            taken = lax.div(steps + (consumers - 1) - first, consumers)

            def soften(scores: jax.Array, norm: Any, token: jax.Array, top: jax.Array) -> Any:
                """(which are seen, maxima, P, rescaling) with a step's scores, the first of token
                `token`."""
                by = factor if norm is None else factor * norm
                if soft_cap is None:
                    scores = scores * (by * LOG2E)
                else:
                    # tanh, whose approximate instruction is off by 2**-11 of the cap.
                    power = jnp.exp2(scores * (by * (2 * LOG2E / soft_cap)))
                    scores = (1.0 - 2.0 / (power + 1.0)) * (soft_cap * LOG2E)
                key = iota(1) + token
                seen = key < visible
                if window is not None:
                    seen &= key >= visible - window
                scores = jnp.where(seen, scores, MASKED)
                new_top = jnp.maximum(top, scores.max(axis=1))
                p = jnp.exp2(scores - over_keys(new_top))
                return seen, new_top, p, jnp.exp2(top - new_top)

            def each(i, carry):
                top, total, minima, accs = carry
                step = first + consumers * i
                slot = lax.rem(place_of(done + step)[1], ring)
                token = first_token + step * PAGE
                plgpu.barrier_wait(memory.codes_loaded.at[wg, slot])
                codes = memory.codes.at[wg, slot]
                (product,) = multiply((fragments.keys(codes),), memory.queries.at[queries_at])
                values = fragments.values(codes)
                norm, scale, middle = fragments.numbers(codes, iota(0).astype(jnp.float32))
                store_turned(scores_smem, product, interpret=interpret)
                plgpu.commit_smem()
                # All four warps have the step's codes, as they met to exchange their scores.
                plgpu.barrier_arrive(memory.codes_read.at[wg, slot])
                scores = plgpu.load(scores_smem, layout=SCORES, optimized=False)
                seen, top, p, rescale = soften(scores, norm, token, top)
                total = total * over_keys(rescale) + p
                # Selected: 0 times the NaN of a token that a row does not see would be NaN.
                minima = minima * over_keys(rescale) + jnp.where(seen, p * middle, 0.0)
                weights = jnp.where(seen, p * scale, 0.0)
                largest = jnp.maximum(weights.max(axis=1), SMALLEST)
                store_terms(p_smem, weights * over_keys(LARGEST_P / largest), interpret=interpret)
                rescale_smem[...] = rescale
                units_smem[...] = largest * (1 / LARGEST_P)
                plgpu.commit_smem()
                by, unit = (of_columns(x) for x in (rescale_smem, units_smem))
                products = multiply(values, p_smem)
                accs = [acc * by + x * unit for acc, x in zip(accs, products, strict=True)]
                return top, total, minima, tuple(accs)

            none = plgpu.layout_cast(jnp.zeros((columns, PAGE), jnp.float32), SCORES)
            empty = (
                plgpu.layout_cast(jnp.full((columns,), EMPTY, jnp.float32), BY_ROW),
                none,
                none,
                (plgpu.layout_cast(jnp.zeros((PAGE, columns), jnp.float32), PRODUCT),) * blocks,
            )
            top, total, minima, accs = lax.fori_loop(0, taken, each, empty)
            minima_smem[...] = minima.sum(axis=1)
            plgpu.commit_smem()
            middles = of_columns(minima_smem)
            merge(
                tuple(acc + middles for acc in accs), top, total.sum(axis=1), epilogue, pair, steps
            )
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
        factors_ref: Any = next(refs)
        order_ref: Any = next(refs) if ordered else None
        query_lens_ref: Any = next(refs) if ragged else None
        sinks_ref: Any = next(refs) if sinks else None
        gate_ref: Any = next(refs) if gated else None
        out_ref = next(refs)
        partial_ref: Any = next(refs) if split else None
        lse_ref = next(refs)
        partial_lse_ref: Any = next(refs) if split else None
        memory = Memory(*refs)
        wg, tile, index = (lax.axis_index(name) for name in ("wg", "tile", "part"))
        begin, end = ((cuts_ref[0, i], cuts_ref[1, i]) for i in (index, index + 1))
        part = CodedPairs(
            begin, end, lens_ref, table_ref, kv_ref, layer_ref[0], index, order_ref,
            kv_heads, head_dim, q_len, window, query_lens_ref, form, page_size,
        )  # fmt: skip
        mine = pl.ds(tile * columns, columns)
        outputs = Outputs(
            part, first_rows, out_rows, head_dim, mine, out_ref, partial_ref, lse_ref,
            partial_lse_ref,
        )  # fmt: skip
        epilogue = Epilogue(wg, memory, outputs, sinks_ref, gate_ref, None, None, interpret)

        @pl.when(wg == consumers)
        def _produce():
            plgpu.set_max_registers(40, action="decrease")
            produce(part, q_ref, tile, memory)

        @pl.when(wg < consumers)
        def _consume():
            plgpu.set_max_registers(REGISTERS[consumers], action="increase")
            consume(part, wg, tile * columns, epilogue, memory, factors_ref)

    return body
