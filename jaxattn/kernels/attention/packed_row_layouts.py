"""Register layouts of products whose columns are packed rows (query token, head), for `mla_decode`
with few rows, `gqa_decode` and `turbo_attention`."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.split_kv_schedule import PAGE

# Padding after a row of scores or of the output in shared memory, in float32 numbers, so that the
# columns of neighboring rows lie in different banks.
MARGIN = 4


def tiled(tiles: Any, warps: int, *lanes: int) -> Any:
    """Returns the layout of such tiles; one thread holds the numbers of the last dimension."""
    tiling = plgpu.Tiling(tiles)
    return plgpu.Layout.TILED(tiling, warp_dims=(warps,), lane_dims=lanes, vector_dim=-1)


# Registers of scores [N, 64], four numbers per thread: half a warp has a row of scores.
SCORES = tiled(((8, PAGE), (2, PAGE), (4,)), -5, -3, -2)
# Layouts of one number per packed row, matching its scores and the columns of its products.
BY_ROW, BY_COLUMN = SCORES.reduce(1), plgpu.Layout.WGMMA.reduce(0)
