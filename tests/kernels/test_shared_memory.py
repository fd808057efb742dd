"""Shared memory of a block, counted without a GPU: every shape that decode takes has room."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import core as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import FP8
from jaxattn.core.dispatch import Refusal, traced_for_hopper
from jaxattn.core.turboquant.codec import PRESETS, TurboFormat
from jaxattn.gqa import gqa_decode
from jaxattn.kernels.gqa.decode import smem as plain
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import RESERVED_BYTES, SHARED_BYTES, shared_bytes
from jaxattn.kernels.turboquant import smem as coded

ROOM = SHARED_BYTES - RESERVED_BYTES
DIMS = (64, 128, 256)
# Packed rows of up to 8 query tokens and of groups of up to 16.
ROWS = sorted({s * group for s, group in itertools.product(range(1, 9), range(1, 17))})


def columns_of(dim: int) -> list[int]:
    return sorted({plain.block_columns(rows, dim)[0] for rows in ROWS})


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("cache_dtype", [jnp.bfloat16, jnp.float16, FP8], ids=jnp.dtype)
def test_every_group_and_number_of_tokens_has_room(cache_dtype, dim):
    """48 packed rows of 128 dims over FP8 wanted 264 bytes too many."""
    cache_dtype = jnp.dtype(cache_dtype)
    dtype = plain.product_dtype(jnp.bfloat16, cache_dtype)
    for columns, steps in itertools.product(columns_of(dim), (0, 1, plain.FEW_STEPS)):
        room = plain.cta_resources(columns, dim, cache_dtype, steps)
        assert min(room.ahead) >= 1
        for page in plain.PAGE_SIZES:
            types = plain.scratch_types(dtype, cache_dtype, columns, dim, page, room)
            assert shared_bytes(x for x in types if x is not None) <= ROOM, (columns, steps, page)


@pytest.mark.filterwarnings("ignore:the cache format:UserWarning")
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_group_has_room_over_turboquant(preset, dim):
    form = TurboFormat(preset=preset, head_dim=dim)
    for columns, page in itertools.product(columns_of(dim), plain.PAGE_SIZES):
        room = coded.turbo_cta_resources(form, columns, page)
        needed = shared_bytes(coded.scratch_types(form, columns, page, room))
        assert room.steps >= 1 and needed <= ROOM, (columns, page)


def fp8_decode(q_len: int, group: int):
    """Lowers `gqa_decode` for CUDA."""
    x = jax.ShapeDtypeStruct
    args = (
        x((2, q_len, group, 128), jnp.bfloat16), x((9, 2, 64, 1, 128), FP8),
        x((2, 8), jnp.int32), x((2,), jnp.int32), x((2, 1), jnp.float32),
    )  # fmt: skip

    def op(*args):
        *args, kv_scale = args
        return gqa_decode(*args, kv_scale=kv_scale, implementation="mosaic_gpu")

    with traced_for_hopper(True):
        return jax.jit(op).trace(*args).lower(lowering_platforms=("cuda",))


def test_mosaic_counts_the_same_bytes(monkeypatch):
    """8 tokens of a group of 6: with one byte less Mosaic says how much it wants."""
    room = plain.cta_resources(48, 128, FP8, 0)
    half = jnp.dtype(jnp.float16)
    needed = shared_bytes(plain.scratch_types(half, FP8, 48, 128, 64, room))
    monkeypatch.setattr(mosaic, "_SMEM_SIZE_BOUND", needed - 1)
    with pytest.raises(ValueError, match=f"smem_bytes={needed} > "):
        fp8_decode(8, 6)
    monkeypatch.setattr(mosaic, "_SMEM_SIZE_BOUND", needed)
    fp8_decode(8, 6)


def test_a_launch_of_too_much_shared_memory_is_refused_by_name():
    x = jnp.zeros(128)
    run = functools.partial(
        launch,
        lambda **refs: None,
        grid={"block": 1},
        inputs={"x_ref": x},
        outputs={"out_ref": jax.ShapeDtypeStruct((128,), x.dtype)},
    )
    smem = {"smem": plgpu.SMEM((ROOM // 4,), jnp.float32), "there": plgpu.Barrier(num_arrivals=1)}
    with pytest.raises(Refusal, match=r"wide: a CTA needs 232,456 bytes .* has only 232,44"):
        run(name="wide", scratch=smem)
