"""Sizes of a cached latent, its quarters and its block scales; the swizzle of a quarter's tile."""

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import BLOCK

RANK, ROPE = 512, 64
HALF, QUARTER = RANK // 2, RANK // 4
BLOCKS = RANK // BLOCK  # blocks of 128 dims, each with a scale in a block-scaled cache
SCALE_BYTES = 4 * BLOCKS
# A tile's rows are as wide as the swizzle. (A tiling would need the cache's rows to be a multiple
# of it.)
SWIZZLED = (plgpu.SwizzleTransform(QUARTER),)  # type: ignore[abstract]
