"""MLA decode over a paged latent cache: softmax(q K^T) K[:, :kv_lora_rank], K read once.

One block per (64 packed rows of S tokens x H heads, split of the pages, batch row). Three
warpgroups: two own half of the 512 output columns each, the third issues the TMA copies, a page of
64 tokens a step into a ring of two. Per page

    warpgroup 0    scores = Q K^T, softmax; P and the rescaling of the rows to shared memory
    both           acc_w = rescale acc_w + P K[:, 256 w : 256 w + 256]

so the scores are computed once. P has one buffer: Q, two pages and P fill the shared memory.

Limits: R 512 and P 64 (D 576), pages of 64 tokens, bfloat16 or float16, any H and S. The splits are
a function of static shapes alone, so a row's bits do not depend on what else is in the batch.
Reference and tests: `jaxattn.mla.mla_decode` (implementation="xla"), tests/test_mla_kernel.py.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.arena import Arena, ArenaSpec
from jaxattn.kernels.hopper import interpret_mode, require_hopper, swizzled, wgmma

LOG2E = math.log2(math.e)
TILE = 64  # rows of a wgmma tile
PAGE = 64
RANK, ROPE = 512, 64
# Far enough apart that exp2(MASKED - EMPTY) is 0 and no difference is inf - inf.
EMPTY, MASKED = -1e30, -1e33


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut for one set of static shapes."""

    splits: int = 1  # parts that a row's pages are divided into
    stages: int = 2  # pages in shared memory: Q and two pages fill 221,184 of 232,448 bytes
    compute_registers: int = 232  # 232 + 232 + 40 = 504, the most that three warpgroups may have
    memory_registers: int = 40

    @classmethod
    def for_shape(
        cls, *, batch: int, q_len: int, num_heads: int, max_pages: int, num_sms: int = 132
    ) -> "Config":
        """Enough splits to give every SM a block, while a split keeps at least four pages."""
        blocks = batch * num_tiles(q_len, num_heads)
        return cls(splits=max(1, min(num_sms // blocks, max_pages // 4)))


def num_tiles(q_len: int, num_heads: int) -> int:
    return -(-q_len * num_heads // TILE)


def scratch(
    *,
    batch: int,
    q_len: int,
    num_heads: int,
    kv_lora_rank: int = RANK,
    dtype: Any = jnp.bfloat16,
    max_pages: int = 1,
) -> ArenaSpec:
    """What `mla_decode` keeps in the arena: its output, and where it splits the float32 partials.

    Args:
        batch: B, rows of the bucket.
        q_len: S, query tokens of a row.
        num_heads: H.
        kv_lora_rank: R.
        dtype: the queries' dtype.
        max_pages: M, width of the block tables; a long row of a small batch is split.

    Returns:
        Regions `out` [B, tiles * 64, R] with row s * H + h, and if the pages are split
        `partial_out` float32 [B, splits, tiles * 64, R]. DeepSeek-R1 at 2048 rows: 256 MiB, for
        all layers.
    """
    config = Config.for_shape(batch=batch, q_len=q_len, num_heads=num_heads, max_pages=max_pages)
    return _spec(batch, num_tiles(q_len, num_heads) * TILE, kv_lora_rank, dtype, config.splits)


def _spec(batch: int, rows: int, rank: int, dtype: Any, splits: int) -> ArenaSpec:
    regions: dict[str, Any] = {"out": ((batch, rows, rank), dtype)}
    if splits > 1:
        regions["partial_out"] = ((batch, splits, rows, rank), jnp.float32)
    return ArenaSpec.of("mla_decode", **regions)


def _refuse(q: jax.Array, kv_cache: jax.Array, kv_lora_rank: int) -> None:
    dim, page = kv_cache.shape[-1], kv_cache.shape[-2]
    if kv_lora_rank != RANK or dim != RANK + ROPE:
        raise NotImplementedError(
            f"mla_decode: the kernel has kv_lora_rank 512 and qk_rope_head_dim 64 (D=576), and got "
            f"{kv_lora_rank=} with D={dim}"
        )
    if page != PAGE:
        raise NotImplementedError(f"mla_decode: the kernel reads pages of 64 tokens, got {page}")
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.dtype != kv_cache.dtype:
        raise NotImplementedError(
            f"mla_decode: the kernel wants q and kv_cache both bfloat16 or both float16, and got "
            f"q {q.dtype.name}, kv_cache {kv_cache.dtype.name}"
        )


def mla_decode_mosaic(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    layer: jax.Array | int | None = None,
    kv_lora_rank: int = RANK,
    arena: Arena | None = None,
    config: Config | None = None,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[Any, ...]:
    """`jaxattn.mla.mla_decode` on a Hopper GPU; arguments and results are documented there."""
    require_hopper("mla_decode", interpret=interpret)
    _refuse(q, kv_cache, kv_lora_rank)
    batch, q_len, num_heads, dim = q.shape
    if layer is None:
        kv_cache, layer = kv_cache[None], 0
    tiles = num_tiles(q_len, num_heads)
    rows = tiles * TILE
    config = config or Config.for_shape(
        batch=batch, q_len=q_len, num_heads=num_heads, max_pages=block_tables.shape[1]
    )
    splits = config.splits
    split = splits > 1

    packed = q.reshape(batch, q_len * num_heads, dim)
    packed = jnp.pad(packed, ((0, 0), (0, rows - q_len * num_heads), (0, 0)))
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    operands = (packed, kv_cache, layer, block_tables, seq_lens)

    # The kernel writes rows of a 2-D array: an output of its own, or the arena's whole lane.
    spec = _spec(batch, rows, RANK, q.dtype, splits)
    region = "partial_out" if split else "out"
    lse_type = jax.ShapeDtypeStruct((batch, splits, rows), jnp.float32)
    body = _body(
        config,
        q_len=q_len,
        num_heads=num_heads,
        tiles=tiles,
        scale=scale,
        dtype=q.dtype,
        interpret=interpret,
    )

    def launch(out_type: Any, kernel_body: Any, *refs: Any) -> Any:
        kernel = plgpu.kernel(
            kernel_body,
            out_type=out_type,
            scratch_types=_scratch_types(config, q.dtype),
            # The last axis runs fastest: the tiles of a row read the same pages while in L2.
            grid=(splits, batch, tiles),
            grid_names=("split", "row", "tile"),
            num_threads=3,
            thread_name="wg",
            kernel_name="mla_decode",
            # Row reductions stay inside a warp, and the shared memory is needed for the pages.
            compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
            interpret=interpret_mode(interpret, detect_races=detect_races),
        )
        with jax.enable_x64(False):  # the kernel's integers are int32
            return kernel(*operands, *refs)

    if arena is None:
        out_type = jax.ShapeDtypeStruct(
            (batch * splits * rows, RANK), jnp.float32 if split else q.dtype
        )

        def fresh(*refs: Any) -> None:
            inputs, (out, lse), rest = refs[:5], refs[5:7], refs[7:]
            body(0, *inputs, out, lse, *rest)

        out, lse = launch((out_type, lse_type), fresh)
        out = out.reshape(batch, splits, rows, RANK)
    else:
        lane, first_row = arena.lane(spec, region, width=RANK)
        ref = jax.new_ref(lane)

        def in_place(*refs: Any) -> None:
            inputs, out, lse, rest = refs[:5], refs[5], refs[6], refs[7:]
            body(first_row, *inputs, out, lse, *rest)

        (lse,) = launch((lse_type,), in_place, ref)
        arena = arena.with_lane(spec, region, jax.freeze(ref))
        out = arena.read(spec, region).reshape(batch, splits, rows, RANK)

    if split:
        out, lse = _combine(out, lse)
        out = out.astype(q.dtype)
        if arena is not None:
            arena = arena.write(spec, "out", out)
            out = arena.read(spec, "out")
    else:
        out, lse = out[:, 0], lse[:, 0]
    out = out[:, : q_len * num_heads].reshape(batch, q_len, num_heads, RANK)
    lse = lse[:, : q_len * num_heads].reshape(batch, q_len, num_heads)
    return (out, lse) if arena is None else (out, lse, arena)


@jax.named_scope("mla_combine")
def _combine(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges the splits: out float32 [B, splits, rows, R], lse natural [B, splits, rows]."""
    top = lse.max(axis=1, keepdims=True)
    weight = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(lse - jnp.where(top == -jnp.inf, 0.0, top)))
    total = weight.sum(axis=1)
    empty = total == 0
    safe = jnp.where(empty, 1.0, total)
    # Parts are added in order, so that the sum does not depend on how XLA would tile a reduction.
    parts = [(weight[:, i] / safe)[..., None] * out[:, i] for i in range(out.shape[1])]
    merged = functools.reduce(operator.add, parts)
    return merged, jnp.where(empty, -jnp.inf, top[:, 0] + jnp.log(safe))


def _scratch_types(config: Config, dtype: Any) -> list[Any]:
    tiled = swizzled(dtype)
    return [
        plgpu.SMEM((TILE, RANK + ROPE), dtype, transforms=tiled),  # Q
        plgpu.SMEM((config.stages, PAGE, RANK + ROPE), dtype, transforms=tiled),
        plgpu.SMEM((TILE, PAGE), dtype, transforms=tiled),  # P
        plgpu.SMEM((TILE,), jnp.float32),  # rescaling of the rows; at the end their sums
        plgpu.Barrier(),  # Q loaded
        plgpu.Barrier(num_barriers=config.stages),  # page loaded
        plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),  # page read by both
        plgpu.Barrier(),  # P and the rescaling written by warpgroup 0
        plgpu.Barrier(),  # P and the rescaling read by warpgroup 1
    ]


def _body(
    config: Config,
    *,
    q_len: int,
    num_heads: int,
    tiles: int,
    scale: float,
    dtype: Any,
    interpret: bool,
) -> Any:
    tile_layout = plgpu.Layout.WGMMA
    row_layout = tile_layout.reduce(1)
    columns = RANK // 2  # of the output, that a compute warpgroup owns

    def over_rows(vector: jax.Array, width: int) -> jax.Array:
        return lax.broadcast_in_dim(vector, (TILE, width), [0])

    def iota(shape: tuple[int, int], dimension: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=tile_layout)

    def body(
        first_row, q_ref, kv_ref, layer_ref, table_ref, lens_ref, out_ref, lse_ref,
        q_smem, kv_smem, p_smem, row_smem, q_loaded, loaded, read, p_written, p_read,
    ):  # fmt: skip
        wg, tile = lax.axis_index("wg"), lax.axis_index("tile")
        split, row = lax.axis_index("split"), lax.axis_index("row")
        length = lens_ref[row]
        pages = jnp.minimum(lax.div(length + PAGE - 1, PAGE), table_ref.shape[1])
        per_split = lax.div(pages + config.splits - 1, config.splits)
        start = split * per_split
        steps = jnp.maximum(jnp.minimum(start + per_split, pages) - start, 0)

        zero_rows = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), row_layout)
        zero_out = plgpu.layout_cast(jnp.zeros((TILE, columns), jnp.float32), tile_layout)

        def add_values(acc, i, rescale, half):
            """acc = rescale acc + P V, for this warpgroup's half of the columns."""
            slot = lax.rem(i, config.stages)
            left = length - (start + i) * PAGE  # tokens of the row from this page on
            values = kv_smem.at[slot, :, pl.ds(half * columns, columns)]

            # Warpgroup 0 has read the keys. What lies past the end of the sequence may be NaN, and
            # 0 * NaN is NaN: it becomes 0 before it is used as a value.
            @pl.when(left < PAGE)
            def _clear_tail():
                inside = iota((PAGE, columns), 0) < left
                kept = plgpu.load(values, layout=tile_layout)
                values[...] = jnp.where(inside, kept, jnp.zeros((), dtype))
                plgpu.commit_smem()

            acc *= over_rows(rescale, columns)
            acc = wgmma(acc, p_smem, values, shape=(TILE, columns), interpret=interpret)
            plgpu.barrier_arrive(read.at[slot])
            return acc

        def write_out(acc, total, half):
            total = over_rows(total, columns)
            out = jnp.where(total < 0, 0.0, acc / total)
            at = first_row + ((row * config.splits + split) * tiles + tile) * TILE
            out_ref[pl.ds(at, TILE), pl.ds(half * columns, columns)] = out.astype(out_ref.dtype)

        @pl.when(wg == 0)
        def _scores_and_left_half():
            plgpu.set_max_registers(config.compute_registers, action="increase")

            @pl.when(steps > 0)  # nothing is read for a padding row
            def _():
                plgpu.copy_gmem_to_smem(q_ref.at[row, pl.ds(tile * TILE, TILE)], q_smem, q_loaded)
                plgpu.barrier_wait(q_loaded)

            # Keys that each packed row sees: causal from the bottom right.
            packed_row = tile * TILE + iota((TILE, PAGE), 0)
            visible = jnp.full((TILE, PAGE), length - (q_len - 1), jnp.int32)
            visible = plgpu.layout_cast(visible, tile_layout)
            for token in range(1, q_len):
                visible += (packed_row >= token * num_heads).astype(jnp.int32)

            def page_step(i, carry):
                top, total, acc = carry
                slot = lax.rem(i, config.stages)
                plgpu.barrier_wait(loaded.at[slot])
                keys = kv_smem.at[slot].transpose((1, 0))
                scores = wgmma(None, q_smem, keys, shape=(TILE, PAGE), interpret=interpret)
                mask = iota((TILE, PAGE), 1) + (start + i) * PAGE < visible
                scores = jnp.where(mask, scores * (scale * LOG2E), MASKED)
                new_top = jnp.maximum(top, scores.max(axis=1))
                rescale = jnp.exp2(top - new_top)
                p = jnp.exp2(scores - over_rows(new_top, PAGE))
                total = total * rescale + p.sum(axis=1)

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(p_read)

                p_smem[...] = p.astype(dtype)
                row_smem[...] = rescale
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_written)
                return new_top, total, add_values(acc, i, rescale, 0)

            init = (zero_rows + EMPTY, zero_rows, zero_out)
            top, total, acc = lax.fori_loop(0, steps, page_step, init)
            # A NaN total is not 0: a NaN among a row's own keys shows in its output. Of a row that
            # sees no key acc is 0 * V, NaN where V is: a sum of -1 tells write_out to write 0.
            empty = total == 0
            total = jnp.where(empty, -1.0, total)

            @pl.when(steps > 0)
            def _():
                plgpu.barrier_wait(p_read)

            row_smem[...] = total
            plgpu.barrier_arrive(p_written)
            write_out(acc, total, 0)
            lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) * (1 / LOG2E))
            lse_ref[row, split, pl.ds(tile * TILE, TILE)] = lse

        @pl.when(wg == 1)
        def _right_half():
            plgpu.set_max_registers(config.compute_registers, action="increase")

            def page_step(i, acc):
                plgpu.barrier_wait(p_written)
                plgpu.barrier_wait(loaded.at[lax.rem(i, config.stages)])
                rescale = plgpu.load(row_smem, layout=row_layout)
                acc = add_values(acc, i, rescale, 1)
                plgpu.barrier_arrive(p_read)
                return acc

            acc = lax.fori_loop(0, steps, page_step, zero_out)
            plgpu.barrier_wait(p_written)
            write_out(acc, plgpu.load(row_smem, layout=row_layout), 1)

        @pl.when(wg == 2)
        def _memory():
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            @pl.loop(0, steps)
            def _(i):
                slot = lax.rem(i, config.stages)

                @pl.when(i >= config.stages)
                def _():
                    plgpu.barrier_wait(read.at[slot])

                page = table_ref[row, start + i]
                plgpu.copy_gmem_to_smem(
                    kv_ref.at[layer_ref[0], page], kv_smem.at[slot], loaded.at[slot]
                )

            # A thread that waits on a barrier has to see each of its completions.
            @pl.loop(jnp.maximum(steps - config.stages, 0), steps)
            def _(i):
                plgpu.barrier_wait(read.at[lax.rem(i, config.stages)])

    return body
