"""Shared memory of `mla_decode`, and the places of pages in it.

kernel.py describes when a page is where.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import LatentFormat
from jaxattn.kernels.attention.split_kv_schedule import PAGE, TILE, copies_of
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.mla.decode.latent_tile import QUARTER, ROPE, SCALE_BYTES, SWIZZLED

LAYOUT = plgpu.Layout.WGMMA
PAGES = 3  # pages for which there are rope columns, P and rescalings
# Tiles of 128 bytes of each token in which an FP8 page is copied: one per quarter, and the last
# 128.
RAW = 5


@dataclasses.dataclass(frozen=True)
class PageSlots:
    """The places in shared memory of the pages that the products read.

    Attributes:
        slots: For each quarter of 128 columns, the number of pages that there is room for.
        order: The order of the quarters in Q K^T; -1 stands for the rope columns.
        held_back: Whether a page is multiplied by P only when the next page's scores are done.
    """

    slots: tuple[int, int, int, int]
    order: tuple[int, ...]
    held_back: bool

    @property
    def firsts(self) -> tuple[int, ...]:
        """For each quarter, the place of its first page."""
        return tuple(sum(self.slots[:quarter]) for quarter in range(len(self.slots)))

    @classmethod
    def of(cls, latents: LatentFormat) -> "PageSlots":
        """The places for a cache format; kernel.py explains those of 16 bits, fp8_page_loader.py
        those of FP8."""
        if latents.quantized:
            return cls((2, 2, 2, 2), (2, 0, 3, 1, -1), held_back=False)
        return cls((2, 3, 3, 3), (3, 2, 1, -1, 0), held_back=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlaDecodeSmem:
    """The memory that the three warpgroups share, arrays and then barriers."""

    kv: Any  # [place, 64, 128], quarters of pages
    rope: Any  # [PAGES, 64, 64], rope columns of pages, then P
    rescale: Any  # float32 [PAGES, 64], of the rows, applied before the page is added
    sums: Any  # float32 [64], sums of a piece's rows at its end; negative where one sees no key
    kv_loaded: Any
    rope_loaded: Any
    p_written: Any  # P and the rescaling
    p_read: Any  # arrived at by warpgroup 1, where rope columns take P's place
    scores_done: Any  # except for a piece's first page
    sums_written: Any
    sums_read: Any  # arrived at by both
    # RAW tiles, or one fewer for gathered block-scaled tokens, whose rope columns need none.
    raw: Any  # FP8 [tiles, 64, 128], the next page as it is stored; else None
    raw_loaded: Any
    raw_scales: Any  # bytes [tiles, 64, 16], the tokens' scales for each tile; else None


def shared_types(
    dtype: Any, latents: LatentFormat, page_size: int, *, keys_from_list: bool = False
) -> MlaDecodeSmem:
    tiled, copies, places = swizzled(dtype), copies_of(page_size), PageSlots.of(latents)
    kv_places = sum(places.slots)
    # Arrivals of the warpgroup that has widened or gathered, or of the copies.
    arrivals = 1 if latents.quantized or keys_from_list else copies
    stored: dict[str, Any] = {"raw": None, "raw_loaded": None, "raw_scales": None}
    # The rope columns of gathered block-scaled tokens are copied to where they are read.
    tiles = RAW - (keys_from_list and latents.block_scaled)
    if latents.quantized:
        raw = plgpu.SMEM((tiles, PAGE, QUARTER), latents.dtype, transforms=SWIZZLED)
        pieces = copies * (1 + latents.block_scaled)
        loaded = plgpu.Barrier(num_arrivals=pieces, num_barriers=RAW)
        stored |= {"raw": raw, "raw_loaded": None if keys_from_list else loaded}
    if latents.block_scaled:
        stored["raw_scales"] = plgpu.SMEM((tiles, PAGE, SCALE_BYTES), latents.dtype)
    return MlaDecodeSmem(
        kv=plgpu.SMEM((kv_places, PAGE, QUARTER), dtype, transforms=tiled),
        rope=plgpu.SMEM((PAGES, PAGE, ROPE), dtype, transforms=tiled),
        rescale=plgpu.SMEM((PAGES, TILE), jnp.float32),
        sums=plgpu.SMEM((TILE,), jnp.float32),
        kv_loaded=plgpu.Barrier(num_arrivals=arrivals, num_barriers=kv_places),
        rope_loaded=plgpu.Barrier(num_arrivals=arrivals, num_barriers=PAGES),
        p_written=plgpu.Barrier(num_barriers=PAGES),
        p_read=plgpu.Barrier(num_barriers=PAGES),
        scores_done=plgpu.Barrier(num_barriers=PAGES),
        sums_written=plgpu.Barrier(),
        sums_read=plgpu.Barrier(num_arrivals=2),
        **stored,
    )
