"""Keys and queries of a chunk, scaled channel by channel by the decays between tokens.

With `a` the decay of a token, blocks of `size` tokens, and j running over tokens of i's block,

    up_to_i  = prod a_j, j <= i         behind_i = prod a_j, j > i

A row i of a block's second half meets a column j of its first half with up_to_i behind_j, both of
blocks of half the size. Every factor is a product of decays, at most 1, and no exponent is a
difference: a decay of exactly 0 or 1 is exact.

A warp has 16 tokens and a lane two channels, so that up to blocks of 16 everything is in a thread's
registers. Only for larger blocks do warps exchange the decays of their 16 tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.chunk.tiles import CHUNK
from jaxattn.kernels.hopper.mlir import arith, ir, llvm, scf
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    asm,
    element,
    f32,
    fragmented,
    i32,
    joined,
    load,
    plus,
    pointer,
    store,
    times,
    word,
)

OWN = plgpu.Layout.TILED(
    plgpu.Tiling(((CHUNK, 64), (16, 64), (2,))), warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1
)
WARP_TOKENS = 16
HALF_WARP = WARP_TOKENS // 2
PLAIN = plgpu.RefType()
KEYS, QUERIES = 0, 1  # rows of the lengths: the factors of a key, and of a query


def _typed(dtype: Any) -> Any:
    return plgpu.ShapeDtypeStruct((CHUNK, 64), dtype, layout=OWN)


class DecayFactors:
    """A warpgroup's half of the channels of a chunk: keys, queries, and both factors of each."""

    def __init__(self, k: jax.Array, q: jax.Array, decays: jax.Array, *, interpret: bool):
        """k, q: [64, 64]; decays: float32 [64, 64]."""
        self.k, self.q, self.interpret = k, q, interpret
        self.decay_to_token, self.decay_to_end = (
            decays,
            plgpu.layout_cast(jnp.ones_like(decays), OWN),
        )

    def write(self, size: int, k_tile: Any, q_tile: Any, totals: Any) -> None:
        """Writes rows and columns where halves of `size` tokens meet, and advances to blocks twice
        as large.

        Args:
            k_tile: [64, 64], keys of second halves times `decay_to_token`, those of first halves
                times `decay_to_end`.
            q_tile: [64, 64], queries of second halves times `decay_to_token`; the others are
                ignored. Below size 16 the rows of both are in the order of `place_of`.
            totals: float32 [4, 64], decays of 16 tokens by `share_totals`, from size 16 on.
        """
        state = (self.k, self.q, self.decay_to_token, self.decay_to_end)
        if self.interpret:
            self.decay_to_token, self.decay_to_end = _interpreted(size, *state, k_tile, q_tile)
            return

        def run(ctx: Any, *args: Any) -> Any:
            del ctx
            return (_in_a_thread if size < WARP_TOKENS else _between_warps)(size, *args)

        types = (OWN,) * 4 + (PLAIN,) * 3
        out = (_typed(jnp.float32),) * 2
        run_inline = plgpu.inline_mgpu(arg_types=types, return_type=out)(run)
        self.decay_to_token, self.decay_to_end = run_inline(*state, k_tile, q_tile, totals)

    def share_totals(self, totals: Any) -> None:
        """Stores the decays of blocks, which have 16 tokens by now, to shared memory float32
        [4, 64]."""
        if not self.interpret:
            plgpu.inline_mgpu(arg_types=(OWN, PLAIN))(_store_totals)(self.decay_to_token, totals)
        plgpu.commit_smem()

    def write_ends(self, lengths: Any, q_read: Any, k_read: Any, k_written: Any, end: Any) -> None:
        """Writes the operands that meet the state before and after, [64, 64] each, and float32 [64]
        the whole decay.

        lengths: float32 [2, 64], a factor for every key and every query.
        """
        if self.interpret:
            k, q = (x.astype(jnp.float32) for x in (self.k, self.q))
            k, q = k * lengths[KEYS, :][:, None], q * lengths[QUERIES, :][:, None]
            q_read[...] = (q * self.decay_to_token).astype(self.q.dtype)
            k_read[...] = (-k * self.decay_to_token).astype(self.k.dtype)
            k_written[...] = (k * self.decay_to_end).astype(self.k.dtype)
            end[...] = self.decay_to_token[-1]
            return
        state = (self.k, self.q, self.decay_to_token, self.decay_to_end)
        plgpu.inline_mgpu(arg_types=(OWN,) * 4 + (PLAIN,) * 5)(_ends)(
            *state, lengths, q_read, k_read, k_written, end
        )


def load_half(k: Any, q: Any, g: Any, *, interpret: bool) -> tuple[jax.Array, ...]:
    """Loads keys, queries and log decays [64, 64] from shared memory. The 128-byte rows of the
    first two are swizzled."""
    if interpret:
        return k[...], q[...], g[...]
    out = (_typed(k.dtype), _typed(q.dtype), _typed(jnp.float32))
    return plgpu.inline_mgpu(arg_types=(PLAIN,) * 3, return_type=out)(_load)(k, q, g)


def within(length: jax.Array, x: jax.Array, fill: float, *, interpret: bool) -> jax.Array:
    """Returns `x` [64, 64], with `fill` from row `length` on."""
    if interpret:
        token = lax.broadcasted_iota(jnp.int32, (CHUNK, 64), 0)
    else:
        token = plgpu.broadcasted_iota(jnp.int32, (CHUNK, 64), 0, layout=OWN)
    return jnp.where(token < length, x, jnp.asarray(fill, x.dtype))


def place_of(token: Any, size: int) -> tuple[Any, Any]:
    """Returns, for a token of 16, whether it is in a second half of `size` tokens, and its index
    among the eight tokens in halves of the same kind. A warp's 16 rows of keys have first halves'
    tokens in rows 0 to 7 and second halves' in rows 8 to 15. Its queries, only of second halves,
    are in 8 rows."""
    return token // size % 2, token // (2 * size) * size + token % size


def _interpreted(
    size: int, k: jax.Array, q: jax.Array, decay_to_token: jax.Array, decay_to_end: jax.Array,
    k_tile: Any, q_tile: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    blocks = CHUNK // size
    is_second = (jnp.arange(CHUNK) // size % 2 == 1)[:, None]
    factor = jnp.where(is_second, decay_to_token, decay_to_end)
    keys = (k.astype(jnp.float32) * factor).astype(k.dtype)
    queries = (q.astype(jnp.float32) * factor).astype(q.dtype)
    if size < WARP_TOKENS:
        token = jnp.arange(CHUNK)
        half, rank = place_of(token % WARP_TOKENS, size)
        first_of_warp = token // WARP_TOKENS * WARP_TOKENS
        keys = keys[jnp.argsort(first_of_warp + HALF_WARP * half + rank)]
        # Second halves' first, by rank in each warp's 8.
        queries = queries[jnp.argsort(CHUNK * (1 - half) + first_of_warp // 2 + rank)]
    k_tile[...] = keys
    q_tile[...] = queries
    total = decay_to_token.reshape(blocks, size, 64)[:, -1]
    other_totals = total.reshape(blocks // 2, 2, 64)[:, ::-1].reshape(blocks, 1, 64)
    other_totals = jnp.broadcast_to(other_totals, (blocks, size, 64)).reshape(CHUNK, 64)
    return jnp.where(is_second, decay_to_token * other_totals, decay_to_token), jnp.where(
        is_second, decay_to_end, decay_to_end * other_totals
    )


class DecayTileOffsets:
    """The offsets of a thread's tokens and channels, in rows of 128 and of 256 bytes."""

    def __init__(self) -> None:
        thread = WarpgroupThread()
        self.warp = thread.warp
        self.lane = arith.andi(thread.index, word(31))
        first, column = times(self.warp, 128 * WARP_TOKENS), times(self.lane, 4)
        self.swizzled = [plus(first, arith.xori(column, word(16 * row))) for row in range(8)]
        self.channel = times(self.lane, 8)
        self.plain = plus(times(self.warp, 256 * WARP_TOKENS), self.channel)

    def store(self, words: list[Any], ref: Any) -> None:
        for i, value in enumerate(words):
            store(value, ref, self.swizzled[i % 8], 128 * i)


def _pair_of(ref: Any) -> Any:
    return ir.VectorType.get((2,), ir.MemRefType(ref.type).element_type)


def _load(ctx: Any, k: Any, q: Any, g: Any) -> Any:
    del ctx
    place, layout = DecayTileOffsets(), OWN.to_mgpu()

    def rows(ref: Any, offsets: list[Any], pitch: int) -> Any:
        pair = _pair_of(ref)
        registers = []
        for i in range(WARP_TOKENS):
            loaded = load(ref, offsets[i % len(offsets)], pitch * i, 2, pair.element_type)
            registers.append(joined(loaded))
        return fragmented(registers, (CHUNK, 64), layout)

    swizzled = place.swizzled
    return rows(k, swizzled, 128), rows(q, swizzled, 128), rows(g, [place.plain], 256)


def _numbers(pair: Any) -> list[Any]:
    """Returns a pair of 16-bit numbers in float32."""
    if isinstance(pair.type.element_type, ir.BF16Type):
        both = llvm.bitcast(i32(), pair)
        low, high = arith.shli(both, word(16)), arith.andi(both, word(0xFFFF0000))
        return [arith.bitcast(f32(), x) for x in (low, high)]
    return [arith.extf(f32(), element(pair, i)) for i in range(2)]


def _rounded(values: list[Any], like: Any) -> Any:
    """Returns two numbers as a word of two of the 16-bit type of the pair `like`."""
    kind = "bf16x2" if isinstance(like.type.element_type, ir.BF16Type) else "f16x2"
    code = f"cvt.rn.{kind}.f32 $0, $1, $2;"
    return asm(code, [i32()], [values[1], values[0]], "=r,f,f", movable=True)[0]


def _scaled(pair: Any, factor: Any) -> Any:
    return _product(_numbers(pair), factor, pair)


def _product(values: list[Any], factor: Any, like: Any) -> Any:
    return _rounded([arith.mulf(x, element(factor, i)) for i, x in enumerate(values)], like)


def _state(decay_to_token: list[Any], decay_to_end: list[Any]) -> Any:
    return tuple(fragmented(x, (CHUNK, 64), OWN.to_mgpu()) for x in (decay_to_token, decay_to_end))


def _in_a_thread(
    size: int,
    k: Any,
    q: Any,
    decay_to_token: Any,
    decay_to_end: Any,
    k_tile: Any,
    q_tile: Any,
    totals: Any,
) -> Any:
    del totals
    k, q, decay_to_token, decay_to_end = (
        list(x.registers.flat) for x in (k, q, decay_to_token, decay_to_end)
    )
    offsets = DecayTileOffsets()
    keys, queries = [None] * WARP_TOKENS, [None] * HALF_WARP
    for i, (key, query) in enumerate(zip(k, q, strict=True)):
        is_second, rank = place_of(i, size)
        if is_second:
            keys[HALF_WARP + rank] = _scaled(key, decay_to_token[i])
            queries[rank] = _scaled(query, decay_to_token[i])
        else:  # nothing comes after a block of one token
            keys[rank] = key if size == 1 else _scaled(key, decay_to_end[i])
    offsets.store(keys, k_tile)
    for i, query in enumerate(queries):
        store(
            query, q_tile, plus(offsets.swizzled[i], times(offsets.warp, -128 * HALF_WARP)), 128 * i
        )
    ends = [decay_to_token[i // size * size + size - 1] for i in range(WARP_TOKENS)]
    for i in range(WARP_TOKENS):
        other_total = ends[i ^ size]
        if i // size % 2 == 1:
            decay_to_token[i] = arith.mulf(decay_to_token[i], other_total)
        else:
            decay_to_end[i] = other_total if size == 1 else arith.mulf(decay_to_end[i], other_total)
    return _state(decay_to_token, decay_to_end)


def _store_totals(ctx: Any, decay_to_token: Any, totals: Any) -> None:
    del ctx
    offsets = DecayTileOffsets()
    store(
        list(decay_to_token.registers.flat)[-1],
        totals,
        plus(times(offsets.warp, 256), offsets.channel),
    )


def _total(totals: Any, offsets: DecayTileOffsets, warp: Any) -> Any:
    return joined(load(totals, plus(times(warp, 256), offsets.channel), 0, 2, f32()))


def _between_warps(
    size: int,
    k: Any,
    q: Any,
    decay_to_token: Any,
    decay_to_end: Any,
    k_tile: Any,
    q_tile: Any,
    totals: Any,
) -> Any:
    k, q, decay_to_token, decay_to_end = (
        list(x.registers.flat) for x in (k, q, decay_to_token, decay_to_end)
    )
    offsets, warps = DecayTileOffsets(), size // WARP_TOKENS
    first_warp = arith.xori(arith.andi(offsets.warp, word(4 - warps)), word(warps))
    other_total = _total(totals, offsets, first_warp)
    for i in range(1, warps):
        other_total = arith.mulf(other_total, _total(totals, offsets, plus(first_warp, word(i))))
    is_second = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(offsets.warp, word(warps)), word(0))
    branch = scf.IfOp(is_second, [x.type for x in (*decay_to_token, *decay_to_end)], has_else=True)  # type: ignore[call-arg]
    with ir.InsertionPoint(branch.then_block):
        offsets.store([_scaled(x, y) for x, y in zip(k, decay_to_token, strict=True)], k_tile)
        offsets.store([_scaled(x, y) for x, y in zip(q, decay_to_token, strict=True)], q_tile)
        scf.yield_([*(arith.mulf(x, other_total) for x in decay_to_token), *decay_to_end])
    with ir.InsertionPoint(branch.else_block):
        offsets.store([_scaled(x, y) for x, y in zip(k, decay_to_end, strict=True)], k_tile)
        scf.yield_([*decay_to_token, *(arith.mulf(x, other_total) for x in decay_to_end)])
    results = list(branch.results)
    return _state(results[:WARP_TOKENS], results[WARP_TOKENS:])


def _ends(
    ctx: Any, k: Any, q: Any, decay_to_token: Any, decay_to_end: Any, lengths: Any, q_read: Any,
    k_read: Any, k_written: Any, end: Any,
) -> None:  # fmt: skip
    del ctx
    k, q, decay_to_token, decay_to_end = (
        list(x.registers.flat) for x in (k, q, decay_to_token, decay_to_end)
    )
    offsets = DecayTileOffsets()
    first = times(offsets.warp, 4 * WARP_TOKENS)
    read, written, queries = [], [], []
    for i in range(WARP_TOKENS):
        if i % 4 == 0:  # a load has four
            key_factors, query_factors = (
                load(lengths, first, 4 * (CHUNK * row + i), 4, f32()) for row in (KEYS, QUERIES)
            )
        scaled_key = [arith.mulf(x, key_factors[i % 4]) for x in _numbers(k[i])]
        scaled_query = [arith.mulf(x, query_factors[i % 4]) for x in _numbers(q[i])]
        read.append(_product(scaled_key, arith.negf(decay_to_token[i]), k[i]))
        written.append(_product(scaled_key, decay_to_end[i], k[i]))
        queries.append(_product(scaled_query, decay_to_token[i], q[i]))
    for values, ref in ((queries, q_read), (read, k_read), (written, k_written)):
        offsets.store(values, ref)
    chunk_decay = [element(decay_to_token[-1], j) for j in range(2)]
    target = llvm.ptrtoint(i32(), pointer(end, offsets.channel))
    # Written by the warp of the last token.
    code = "{ .reg .pred p; setp.eq.u32 p, $3, 3; @p st.shared.v2.f32 [$0], {$1, $2}; }"
    asm(code, [], [target, *chunk_decay, offsets.warp], "r,f,f,r,~{memory}")
