"""Kernels of several programs are compiled beside each other, and each of them once."""

import concurrent.futures
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.kernels.hopper import device
from jaxattn.kernels.hopper.build import parallel_compilation
from jaxattn.kernels.hopper.build.parallel_compilation import ParallelCompiler, kernels_of
from jaxattn.kernels.hopper.build.trace_cache import share_launches
from jaxattn.kernels.linear import rms_norm
from jaxattn.ops.linear.rms_norm import rms_norm_layer

X = jax.ShapeDtypeStruct((2, 256), jnp.bfloat16)
WEIGHTS = jax.ShapeDtypeStruct((4, 256), jnp.bfloat16)


@pytest.fixture(autouse=True)
def no_gpu_needed(monkeypatch):
    monkeypatch.setattr(rms_norm, "require_hopper", lambda *args, **kwargs: None)


def norm(x, weights, eps):
    return rms_norm.rms_norm_mosaic(x, weights, layer=0, eps=eps, dtype=x.dtype)[1]


def lowered(*all_eps):
    """Norms one after another, with kernels that differ by their epsilon."""

    def step(x, weights):
        for eps in all_eps:
            x = norm(x, weights, eps)
        return x

    with share_launches():
        return jax.jit(step).trace(X, WEIGHTS).lower(lowering_platforms=("cuda",))


class Pool(concurrent.futures.Executor):
    """Keeps what it is given to do, and does nothing."""

    def __init__(self):
        self.given = []

    def submit(self, call, *arguments):
        self.given.append(arguments)
        return concurrent.futures.Future()


def test_a_kernel_of_two_programs_is_compiled_once():
    pool, text = Pool(), lowered(1e-6, 1e-5)
    each = ParallelCompiler(pool, jax.devices()[0])
    first, second, other = each.compile(text), each.compile(text), each.compile(lowered(1e-4))
    assert len(first) == 2 and first == second and other[0] not in first
    hashes = {kernel["kernel_hash"] for [kernel] in pool.given}
    assert len(pool.given) == len(hashes) == 3 and all(len(each) == 32 for each in hashes)


def test_what_decides_a_kernel_is_found():
    [kernel] = kernels_of(lowered(1e-6))
    assert set(kernel) == set(parallel_compilation.DECIDES)
    assert kernel["use_custom_barrier"] is False
    assert b"rms_norm" in kernel["module"]


def test_a_program_without_kernels_has_none():
    text = jax.jit(jnp.sin).lower(jnp.zeros(2))
    assert kernels_of(text) == [] and ParallelCompiler(Pool(), jax.devices()[0]).compile(text) == []


def test_a_kernel_that_cannot_be_compiled_says_so_where_it_is_waited_for():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # for a CPU: nothing there knows it
        [kernel] = ParallelCompiler(pool, jax.devices("cpu")[0]).compile(lowered(1e-6))
        assert kernel.exception() is not None


def test_the_assembler_is_asked_for_its_version_once(monkeypatch):
    asked = []
    extension = types.SimpleNamespace(_get_ptxas_isa_version=lambda: asked.append(1) or 90)
    there = types.SimpleNamespace(_mosaic_gpu_ext=extension)
    monkeypatch.setitem(sys.modules, "jax._src.lib.mosaic_gpu", there)
    device.cache_ptxas_version.__wrapped__()
    assert [extension._get_ptxas_isa_version() for _ in range(3)] == [90] * 3
    assert len(asked) == 1


@pytest.mark.gpu
def test_a_program_whose_kernels_were_compiled_before_gives_the_same():
    x = jax.random.normal(jax.random.key(0), X.shape, X.dtype)
    weights = jnp.ones(WEIGHTS.shape, WEIGHTS.dtype)
    text = jax.jit(lambda x, weights: norm(x, weights, 3e-6)).lower(x, weights)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for kernel in ParallelCompiler(pool, jax.devices()[0]).compile(text):
            kernel.result()
    wanted = rms_norm_layer(x, weights, layer=0, eps=3e-6, dtype=x.dtype, implementation="xla")
    np.testing.assert_allclose(
        text.compile()(x, weights).astype(jnp.float32),
        wanted.astype(jnp.float32),
        rtol=1e-2,
        atol=2e-2,
    )
