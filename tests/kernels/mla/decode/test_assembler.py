"""Assemblers that cannot copy a piece of memory as Mosaic asks for it: which kernel runs then."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest

from jaxattn import mla
from jaxattn.arena import Arena
from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.attention import split_kv_schedule
from jaxattn.kernels.hopper import device
from jaxattn.kernels.mla.decode import launch
from tests.helpers.kernel_cases import assert_mla_close, launch_mla_decode
from tests.kernels.mla.decode.test_swap_ab import decode, stored
from tests.kernels.mla.decode.test_warp_specialized import kernel


@pytest.mark.parametrize(
    "format, heads, before, now",
    [
        ("uint8", 16, True, False),  # a page is one piece of memory there
        ("uint8", 33, False, False),
        ("float8_e4m3fn", 16, True, True),
        ("bfloat16", 16, True, True),
    ],
)
def test_only_block_scaled_caches_go_to_the_other_kernel(format, heads, before, now, monkeypatch):
    q = jnp.zeros((1, 1, heads, 576), jnp.bfloat16)
    cache = jnp.zeros((1, 64, 656 if format == "uint8" else 576), format)
    monkeypatch.setattr(launch, "plain_copies", lambda: True)
    assert launch.uses_swap_ab(1, heads, cache) == before
    monkeypatch.setattr(launch, "plain_copies", lambda: False)
    assert launch.uses_swap_ab(1, heads, cache) == now
    launch.refuse(q, cache, 512)


@pytest.mark.parametrize("format", ["uint8", "float8_e4m3fn"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_kernel_by_name_is_refused_with_words(format, plain, monkeypatch):
    monkeypatch.setattr(launch, "plain_copies", lambda: plain)
    cache = jax.ShapeDtypeStruct((1, 64, 656 if format == "uint8" else 576), format)
    refused = format == "uint8" and not plain
    wanted = (
        pytest.raises(Refusal, match="needs the ptxas of CUDA 13") if refused else nullcontext()
    )
    with wanted:
        launch.refuse_assembler(cache)


@pytest.mark.slow(
    reason="a row that the other kernel does not have; found by float64 in "
    "test_warp_specialized, which is that kernel, too"
)
def test_the_other_kernel_is_right_for_few_rows_too(monkeypatch):
    monkeypatch.setattr(launch, "plain_copies", lambda: False)
    some = stored("uint8", [70, 0, 3], heads=5)
    case = some.case
    outs = kernel(case.q, *case.args[1:], scale=case.scale, interpret=True, layer=case.layer)
    assert_mla_close(some.held, *outs)


@pytest.mark.gpu
def test_what_this_machines_assembler_makes_of_it():
    """By name the kernel for few rows is right or refused; the op is right either way."""
    some = stored("uint8", [700, 0, 3], heads=5)
    case = some.case
    if device.plain_copies():
        assert_mla_close(some.held, *decode(some, "mosaic_gpu"))
    else:
        with pytest.raises(Refusal, match="needs the ptxas of CUDA 13"):
            kernel(*case.args, scale=case.scale, columns=True, interpret=False, layer=case.layer)
    outs = mla.mla_decode(
        *case.args, scale=case.scale, layer=case.layer, implementation="mosaic_gpu"
    )
    assert_mla_close(some.held, *outs)


@pytest.mark.parametrize("version, there", [(85, False), (86, True), (90, True)])
def test_it_is_asked_what_it_takes(version, there, monkeypatch):
    import sys
    import types

    mosaic = types.SimpleNamespace(_get_ptxas_isa_version=lambda: version)
    module = types.ModuleType("mosaic_gpu")
    module._mosaic_gpu_ext = mosaic
    monkeypatch.setitem(sys.modules, "jax._src.lib.mosaic_gpu", module)
    device.plain_copies.cache_clear()
    try:
        assert device.plain_copies() == there
    finally:
        device.plain_copies.cache_clear()


@pytest.mark.parametrize("plain", [True, False])
def test_an_arena_holds_what_either_kernel_writes(plain, monkeypatch):
    for module in (launch, split_kv_schedule):
        monkeypatch.setattr(module, "plain_copies", lambda: plain)
    case = stored("uint8", [3], heads=5).case
    batch, tokens, heads, _ = case.q.shape
    pages, page_size = case.block_tables.shape[1], case.kv_cache.shape[-2]
    spec = mla.scratch(
        batch=batch, q_len=tokens, num_heads=heads, max_pages=pages, page_size=page_size
    )
    arena = jax.eval_shape(lambda: Arena.allocate(spec))
    out, lse, _ = jax.eval_shape(
        lambda arena: launch_mla_decode(
            case.q, *case.args[1:], scale=case.scale, interpret=True, layer=case.layer, arena=arena
        ),
        arena,
    )
    assert out.shape == (batch, tokens, heads, 512)
    assert lse.shape == (batch, tokens, heads)
