"""The kernels of a mixture of experts against float64: in the interpreter, and on a Hopper GPU.

Weights of experts that nobody chose and of other layers are NaN, and so is the arena.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxattn.arena import Arena
from jaxattn.kernels.moe.config import Config, Product, choose
from jaxattn.kernels.moe.launch import mixture_of_experts_mosaic, scratch
from jaxattn.ops.moe import mixture_of_experts
from tests.helpers.kernel_cases import both_devices, no_races, relative
from tests.helpers.moe_cases import expected, moe_case

LAYER = 1


def poisoned(stack, ids):
    """NaN in every layer but one, and there in the weights of experts that nobody chose."""
    used = np.unique(ids[(ids >= 0) & (ids < stack.shape[1])])
    clean = jnp.full_like(stack, jnp.nan)
    return clean.at[LAYER, used].set(stack[LAYER, used])


def error_of(y, args, scales):
    x, ids, weights, *stacks = args
    of_layer = {name: scale[LAYER] for name, scale in scales.items()}
    return relative(y, expected(x, ids, weights, *(s[LAYER] for s in stacks), **of_layer))


def taken_apart(case):
    return (case[:5], case[5]) if len(case) == 6 else (case, {})


CASES = {
    "one token": dict(tokens=1, experts=4, top_k=2),
    "sorted": dict(tokens=33, experts=3, top_k=2, width=192),
    "float16": dict(tokens=9, experts=3, top_k=1, dtype=jnp.float16),
    "fp8": dict(tokens=2, experts=3, top_k=1, width=128, fp8=True),
}


@both_devices
@pytest.mark.parametrize("name", CASES)
def test_matches_float64_and_reads_no_other_weights(name, implementation):
    sizes = CASES[name]
    args, scales = taken_apart(moe_case(**sizes))
    x, ids, weights, gate_up, down = args
    ids = ids.at[0, 0].set(-1) if sizes["tokens"] > 1 else ids
    spec = scratch(
        tokens=x.shape[0], top_k=ids.shape[1], experts=gate_up.shape[1], hidden=x.shape[1],
        expert_size=down.shape[-1], dtype=x.dtype,
    )  # fmt: skip
    stacks = [poisoned(stack, np.asarray(ids)) for stack in (gate_up, down)]

    @jax.jit
    def op(x, ids, weights, gate_up, down, scales, arena, layer):
        return mixture_of_experts(
            x, ids, weights, gate_up, down, **scales, layer=layer, arena=arena,
            implementation=implementation,
        )  # fmt: skip

    arena = Arena.allocate(spec).poison()
    y, _ = op(x, ids, weights, *stacks, scales, arena, LAYER)
    # What is between the products is rounded from other sums than the reference's.
    assert error_of(y, (x, ids, weights, gate_up, down), scales) < 1e-3


def cut(columns, *, consumers, parts, depth=128, stages=3, blocks=3):
    common = dict(consumers=consumers, depth=depth, stages=stages, blocks=blocks)
    return Config(
        columns=columns,
        gate_up=Product(parts=2, **common),
        down=Product(parts=parts, **common),
        combine=128,
    )


@pytest.mark.parametrize(
    "config, fp8",
    [
        (cut(16, consumers=2, parts=2), False),
        (cut(8, consumers=1, parts=1, depth=64, stages=2, blocks=2), False),
        (cut(8, consumers=2, parts=1, blocks=5), True),
    ],
    ids=["two warpgroups", "two stages", "fp8"],
)
def test_no_race_and_the_same_whatever_the_cut(config, fp8):
    args, scales = taken_apart(moe_case(11, 3, 2, features=256, width=128, fp8=fp8, seed=3))
    run = functools.partial(
        mixture_of_experts_mosaic, **scales, layer=LAYER, interpret=True, config=config
    )
    with no_races():
        y = jax.block_until_ready(jax.jit(functools.partial(run, detect_races=True))(*args))
    assert error_of(y, args, scales) < 1e-3


def test_a_nan_in_a_token_stays_in_that_token_and_padding_is_zero():
    args = moe_case(10, 3, 2)
    x, ids, weights, gate_up, down = args
    ids = ids.at[4].set(-1)
    run = jax.jit(functools.partial(mixture_of_experts_mosaic, layer=LAYER, interpret=True))
    clean = run(x, ids, weights, gate_up, down)
    found = run(x.at[2].set(jnp.nan), ids, weights.at[4].set(jnp.nan), gate_up, down)
    assert np.isnan(found[2]).all() and not np.asarray(found[4]).any()
    np.testing.assert_array_equal(np.delete(found, [2, 4], 0), np.delete(clean, [2, 4], 0))


def test_in_a_loop_over_layers_the_arena_is_carried():
    x, ids, weights, gate_up, down = moe_case(3, 4, 2, layers=2)
    sizes = dict(tokens=3, top_k=2, experts=4, hidden=128, expert_size=64)

    def of(implementation):
        def step(carry, layer):
            x, arena = carry
            y, arena = mixture_of_experts(
                x, ids, weights, gate_up, down, layer=layer, arena=arena,
                implementation=implementation,
            )  # fmt: skip
            return (x + y.astype(x.dtype), arena), y

        arena = Arena.allocate(scratch(**sizes))
        return lax.scan(step, (x, arena), jnp.arange(2))[1]

    kernel, reference = (jax.jit(of, static_argnums=0)(i) for i in ("mosaic_gpu_interpret", "xla"))
    assert relative(kernel, np.asarray(reference, np.float64)) < 5e-3


REAL = {
    "v2-lite": dict(features=2048, width=1408, experts=8, top_k=6),
    "glm-4.7-flash": dict(features=2048, width=1536, experts=8, top_k=4),
    "qwen3-next": dict(features=2048, width=512, experts=16, top_k=10, fp8=True),
    "v3": dict(features=7168, width=2048, experts=9, top_k=8, fp8=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 33, 128, 700])
@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
def test_real_sizes(shape, tokens):
    args, scales = taken_apart(moe_case(tokens, **shape))
    x, ids, weights, *stacks = args
    y = jax.jit(functools.partial(mixture_of_experts, implementation="mosaic_gpu"))(
        *args, **scales, layer=LAYER
    )
    rows = np.unique([0, tokens // 2, tokens - 1])
    some = (x[rows], ids[rows], weights[rows], *stacks)
    assert error_of(y[rows], some, scales) < 2e-3


@pytest.mark.gpu
def test_a_tokens_bits_do_not_depend_on_the_tile_on_a_gpu():
    args, _ = taken_apart(moe_case(40, 8, 6, features=2048, width=1408))
    sizes = dict(tokens=40, top_k=6, experts=8, hidden=2048, expert_size=1408)
    chosen = choose(**sizes)
    results = [
        jax.jit(
            functools.partial(
                mixture_of_experts_mosaic,
                layer=LAYER,
                config=dataclasses.replace(chosen, columns=columns),
            )
        )(*args)
        for columns in (8, 16, 32, 64)
    ]
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)
