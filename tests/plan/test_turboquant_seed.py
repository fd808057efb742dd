"""Qwen3-32B over k8v4 in 60 layers and bfloat16 in four: 1,024 rows of 40,960 tokens on an H200."""

import dataclasses
import math
import types
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxattn import Arena, Limits, gqa
from jaxattn.core.cache.formats import TURBOQUANT
from jaxattn.engine.startup.executable_memory import ExecutableMemory
from jaxattn.engine.startup.memory_plan import fill, packed_shapes, page_bytes, plan_engine
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.memory.device_memory import known_device
from jaxattn.memory.plan import nbytes
from jaxattn.models.catalog import model_resolver
from jaxattn.plan.device_plan import traced_bounds
from jaxattn.plan.estimated_plan import DRIVER

LIMITS = Limits(
    batch=1024, max_model_len=40_960, prefill_chunk=2048, utilization=0.9, cache_format="k8v4",
    native_layers=2,
)  # fmt: skip
HEADS = dict(num_heads=64, num_kv_heads=8, head_dim=128)
HOPPER = types.SimpleNamespace(device_kind="H200", compute_capability="9.0", core_count=132)
PAGE, WIDTH, MIB = 64, 40_960 // 64, 2**20


def model():
    return model_resolver.load("Qwen3-32B").model.with_cache_format("k8v4", 2)


def test_a_token_takes_110464_bytes():
    assert page_bytes(model().caches) == PAGE * 110_464


# What XLA takes in MiB for the steps with kernels, compiled for a Hopper GPU by jax 0.11.2: temp,
# and results that are no argument's memory.
COMPILED = {
    "prefill of 2048 tokens beside 1024 rows": (284.2, 613.5),
    "score of 2048 tokens": (148.9, 0.0),  # with logits of 256 tokens a call; there are 512 now
    "decode of 1024 x 1 tokens": (753.6, 593.5),
    "round of 1024 rows: greedy": (1003.6, 0.0),
    "round of 1024 rows: draws": (1003.6, 0.0),
    "sample of 1024 rows: draws": (1.4, 0.0),
    "sample of 1024 rows: controls": (593.6, 0.0),
    "sample of 1024 rows: logprobs": (742.1, 0.2),
    "mask of 1024 rows": (0.1, 0.0),
}
TOKENS = 598_784


def room(taken: dict[str, ExecutableMemory]) -> int:
    """Tokens that are left beside what the steps take, by a plan that fits."""
    made, device = model(), known_device("h200")
    params = packed_shapes(made)
    beside = {"outside": DRIVER, "outside_basis": "assumed"}
    filled = fill(made, LIMITS, device, params, taken, **beside)
    plan_engine(made, filled, device, params, taken, **beside).check()
    return filled.num_pages * PAGE


def test_598784_tokens_are_left_beside_what_xla_takes():
    made, taken = model(), {}
    for step in all_steps(LIMITS):
        temp, out = (int(x * MIB) for x in COMPILED.get(str(step), (0.0, 0.0)))
        taken[str(step)] = ExecutableMemory(
            nbytes(step.given(made, LIMITS)) + out, temp, 0, "compiled"
        )
    assert set(COMPILED) <= set(taken)
    assert room(taken) >= TOKENS


@pytest.mark.filterwarnings("ignore:the cache format:UserWarning")
def test_the_plan_without_a_device_leaves_as_many_and_counts_no_less_than_xla_takes():
    bounds = traced_bounds(model(), dataclasses.replace(LIMITS, num_pages=TOKENS // PAGE), True)
    for name, (temp, out) in COMPILED.items():
        assert bounds[name].temp >= temp * MIB and bounds[name].in_out >= out * MIB, name
    assert room(bounds) >= TOKENS


def decode_and_schedule(preset: str, batch: int):
    """The jaxprs of a call over `batch` rows on a Hopper GPU and of its schedule, and its arena."""
    form = gqa.TurboFormat(preset=preset, head_dim=128)
    spec = gqa.scratch(batch=batch, q_len=1, max_pages=WIDTH, page_size=PAGE, **HEADS)
    shape = jax.ShapeDtypeStruct
    lens, tables = shape((batch,), jnp.int32), shape((batch, WIDTH), jnp.int32)
    q = shape((batch, 1, 64, 128), jnp.bfloat16)
    cache = shape((60, 9356, 8, PAGE * form.slot_bytes), jnp.uint8)

    def scheduled(lens):
        return gqa.decode_schedule(lens, q_len=1, max_pages=WIDTH, page_size=PAGE, **HEADS)

    def call(q, cache, tables, lens, arena, schedule):
        return gqa.turbo_attention(
            q, cache, tables, lens, form=form, layer=1, arena=arena, schedule=schedule
        )

    arena = jax.eval_shape(lambda: Arena.allocate(spec))
    with mock.patch.multiple(jax, default_backend=lambda: "gpu", devices=lambda *_: [HOPPER]):
        schedule = jax.eval_shape(scheduled, lens)
        return spec, schedule, jax.make_jaxpr(call)(q, cache, tables, lens, arena, schedule)


@pytest.mark.filterwarnings("ignore:the cache format:UserWarning")
@pytest.mark.parametrize("preset", TURBOQUANT)
@pytest.mark.parametrize("batch", [1, 64, 1024])
def test_decode_keeps_at_most_2_mib_beside_operands_and_results(batch, preset):
    """Schedule, partial results, LSEs and whatever else the call makes: 62.36 GiB elsewhere.

    No rotated queries are among it: what has another dtype or size than queries, output and cache
    is counted, and nothing multiplies outside of the kernel."""
    spec, schedule, jaxpr = decode_and_schedule(preset, batch)
    regions = dict(spec.regions)
    partial = nbytes(regions["partial_out"]) if "partial_out" in regions else 0
    operands = [v.aval for v in jaxpr.jaxpr.invars]
    model_resolver = {(math.prod(x.shape), str(x.dtype)) for x in operands}
    made = 0
    for eqn in jaxpr.jaxpr.eqns:
        assert eqn.primitive.name not in ("dot_general", "mul", "convert_element_type"), eqn
        for x in (v.aval for v in eqn.outvars):
            shape, dtype = getattr(x, "shape", ()), str(getattr(x, "dtype", ""))
            if (math.prod(shape), dtype) not in model_resolver:
                made += math.prod(shape) * jnp.dtype(x.dtype).itemsize
    assert made + partial + nbytes(schedule) <= 2 * MIB
