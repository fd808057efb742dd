"""FP8 numbers as wgmma's operands, on a GPU: the interpreter runs no instructions of our own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.numerics.fp8_block_scaling import BLOCK
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.fp8_conversion import ROWS, SWIZZLED, widened
from jaxattn.kernels.hopper.store.unoptimized_store import store

FP8 = jnp.float8_e4m3fn


def widened_tiles(numbers: jax.Array, dtype) -> jax.Array:
    """Each tile [64, 128] of numbers [64 n, 128] by a block of its own."""

    def body(numbers_ref, out_ref, tile_smem, loaded):
        rows = pl.ds(jax.lax.axis_index("tile") * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(numbers_ref.at[rows], tile_smem, loaded)
        plgpu.barrier_wait(loaded)
        store(out_ref.at[rows], widened(tile_smem, dtype), interpret=False)

    return launch(
        body,
        name="widened",
        grid={"tile": len(numbers) // ROWS},
        inputs={"numbers_ref": numbers},
        outputs={"out_ref": jax.ShapeDtypeStruct(numbers.shape, dtype)},
        scratch={
            "tile_smem": plgpu.SMEM((ROWS, BLOCK), FP8, transforms=SWIZZLED),
            "loaded": plgpu.Barrier(),
        },
        warpgroups=None,
    )["out_ref"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_code_in_every_column_is_exact(dtype):
    """As they are stored, not in pairs; NaN is 480 in bfloat16, as no number is."""
    codes = np.add.outer(np.arange(256), np.arange(BLOCK)).astype(np.uint8)
    numbers = codes.view(FP8)
    found = jax.jit(widened_tiles, static_argnums=1)(numbers, dtype)
    wanted = numbers.astype(np.float32)
    if dtype == jnp.bfloat16:
        wanted = np.where(np.isnan(wanted), np.where(codes < 128, 480, -480), wanted)
    found = np.asarray(found, np.float32)
    np.testing.assert_array_equal(found, wanted)
    assert np.signbit(found[codes == 128]).all() and not np.signbit(found[codes == 0]).any()
