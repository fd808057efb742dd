"""Registers of products whose columns are packed rows (query token, head): `mla_decode` of few
rows, `gqa_decode` and `turbo_attention`."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.split_kv_schedule import PAGE

# Float32 numbers beside a row of scores or of the output in shared memory, so that the columns of
# neighbours lie in other banks.
MARGIN = 4


def tiled(tiles: Any, warps: int, *lanes: int) -> Any:
    """The layout of such tiles, the last dimension's numbers in one thread."""
    tiling = plgpu.Tiling(tiles)
    return plgpu.Layout.TILED(tiling, warp_dims=(warps,), lane_dims=lanes, vector_dim=-1)


# Registers of scores [N, 64], four numbers a thread: half a warp has a row of scores.
SCORES = tiled(((8, PAGE), (2, PAGE), (4,)), -5, -3, -2)
# A number of each packed row, beside its scores and beside the columns of its products.
BY_ROW, BY_COLUMN = SCORES.reduce(1), plgpu.Layout.WGMMA.reduce(0)
