"""Shared memory of `mla_decode_swap_ab`, its register layouts and barriers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import BLOCK, BYTES, LatentFormat
from jaxattn.kernels.attention.packed_row_layouts import MARGIN, tiled
from jaxattn.kernels.attention.split_kv_schedule import PAGE, copies_of
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.mla.decode.latent_tile import BLOCKS, RANK, ROPE, SWIZZLED
from jaxattn.kernels.mla.decode.swap_ab.fp8_register_operands import ROW_BYTES

WARPGROUPS = 2  # they take a piece's pages in turns
# Tiles of a page with one scale, 128 bytes of each token: the blocks, then the rope numbers.
TILES = 1 + BLOCKS
DEPTH = 2  # FP8 pages of a warpgroup in shared memory


# Register layout of outputs [n, 512], four numbers per thread: a warp has 128 columns of a row.
OUTPUTS = tiled(((4, 128), (4,)), -3, -2)


def over_out(vector: jax.Array) -> jax.Array:
    """Broadcasts a number of each packed row over a block of its output [128, N]."""
    wide = lax.broadcast_in_dim(vector, (BLOCK, *vector.shape), [1])
    return plgpu.layout_cast(wide, plgpu.Layout.WGMMA)


def fp8_pages(cache_dtype: Any) -> Any:
    """The scratch type of FP8 pages: in tiles, or block-scaled pages as they are stored."""
    if cache_dtype == BYTES:
        return plgpu.SMEM((WARPGROUPS, DEPTH, PAGE, ROW_BYTES), BYTES)
    return plgpu.SMEM((WARPGROUPS, DEPTH, TILES, PAGE, BLOCK), cache_dtype, transforms=SWIZZLED)


def p_versions(columns: int, cache_dtype: Any) -> int:
    """The number of blocks whose scaled P fits in shared memory at a time."""
    if cache_dtype != BYTES:
        return 1
    return {24: 2, 32: 1}.get(columns, BLOCKS)


def scratch_types(
    dtype: Any, columns: int, page_size: int, cache_dtype: Any, *, with_rope: bool
) -> dict[str, Any]:
    tiles = swizzled(dtype)
    copies, pieces = copies_of(page_size), 1 + with_rope
    quantized = LatentFormat(cache_dtype).quantized
    if quantized:
        pages = fp8_pages(cache_dtype)
        arrivals = copies if cache_dtype == BYTES else TILES * copies
        loaded = plgpu.Barrier(num_arrivals=arrivals, num_barriers=(WARPGROUPS, DEPTH))
    else:
        width = RANK + ROPE if with_rope else RANK
        pages = plgpu.SMEM((WARPGROUPS, PAGE, width), dtype, transforms=tiles)
        loaded = plgpu.Barrier(num_arrivals=copies, num_barriers=WARPGROUPS)
    outputs = plgpu.SMEM((WARPGROUPS, columns, RANK + MARGIN), jnp.float32)
    half = jnp.float16 if quantized else dtype
    rope = dtype if cache_dtype == BYTES else half
    versions = p_versions(columns, cache_dtype)

    def queries(width: int, of_products: Any) -> Any:
        """Q or its rope columns, as TMA loads them and, for an FP8 cache, as the products read
        them: in the same bytes, which are converted in place."""
        both = [plgpu.SMEM((1, columns, width), x, transforms=tiles) for x in (dtype, of_products)]
        return plgpu.RefUnion(*both) if quantized else both[0]

    return {
        "pages_smem": plgpu.RefUnion(pages, outputs),
        "q_smem": queries(RANK, half),
        "q_rope_smem": queries(ROPE, rope) if with_rope else None,
        # The first row's margin also holds each warp's largest scale of a block-scaled page.
        "score_smem": plgpu.SMEM((WARPGROUPS, columns, PAGE + MARGIN), jnp.float32),
        "p_smem": plgpu.SMEM((WARPGROUPS, versions, columns, PAGE), half, transforms=tiles),
        "stats_smem": plgpu.SMEM((4, WARPGROUPS, columns), jnp.float32),
        "q_loaded": plgpu.Barrier(num_arrivals=pieces),
        "warpgroup_barrier": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "loaded": loaded,
    }
