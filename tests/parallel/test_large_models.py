"""The layouts of models that fit on no single GPU: planned, and their steps lowered with shapes."""

import dataclasses
import functools

import jax
import pytest

from jaxattn import Limits
from jaxattn.engine.compilation.sharded_step import arguments, group_of, jitted_step
from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.engine.steps.step_catalog import entry_points
from jaxattn.memory.device_memory import known_device
from jaxattn.models import divided
from jaxattn.models.catalog import model_resolver
from jaxattn.models.catalog.decoder_sizes import DecoderSizes
from jaxattn.parallel import Parallel
from jaxattn.plan import plan
from jaxattn.plan.layout_search import best_layout, layouts_that_fit
from tests.helpers.virtual_devices import on_virtual_devices

LIMITS = Limits(batch=32, max_model_len=8192, prefill_chunk=512)


@functools.cache
def decoder(name: str):
    model = model_resolver.load(name)
    assert isinstance(model, DecoderSizes)
    return model.model


@pytest.mark.slow_cases(
    reason="a cut of another axis or in prefill; found by decode of DeepSeek-R1 over data groups "
    "there, by latents over tensor and context in parallel/test_engine, and by a mixed layout in "
    "parallel/test_same_tokens too"
)
@pytest.mark.parametrize(
    "name, layout, which",
    [
        ("DeepSeek-R1", dict(data=8, expert=8), "decode"),
        pytest.param(
            "DeepSeek-R1", dict(tensor=8, context=8, expert=8), "decode", marks=pytest.mark.slow
        ),
        pytest.param("Kimi-K2", dict(data=2, tensor=4, expert=8), "decode", marks=pytest.mark.slow),
        pytest.param("DeepSeek-R1", dict(data=8, expert=8), "prefill", marks=pytest.mark.slow),
        pytest.param(
            "DeepSeek-R1", dict(tensor=8, context=8, expert=8), "prefill", marks=pytest.mark.slow
        ),
        pytest.param(
            "Kimi-K2", dict(data=2, tensor=4, expert=8), "prefill", marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
@on_virtual_devices
def test_a_step_is_lowered_for_eight_devices(name, layout, which):
    parallel = Parallel(**layout)
    model, devices = divided(decoder(name), parallel), tuple(jax.devices())
    params = packed_shapes(model)
    limits = Limits(batch=32, max_model_len=8192, spread=parallel.context, groups=parallel.data)
    entry = next(each for each in entry_points(limits) if each.kind == which)
    group, tree = group_of(model, devices), jax.tree.structure(params)
    step = jitted_step(entry, model, limits, tree, "xla", "cpu", group)
    lowered = step.lower(*arguments(entry, model, limits, params, group))
    assert lowered.as_text().count("stablehlo.all_reduce") >= 1


@pytest.mark.slow_cases(
    reason="bytes of a cut of another axis; found by DeepSeek-R1's table for 8 GPUs in test_plan "
    "and small models' layouts too"
)
@pytest.mark.parametrize(
    "name, gpus, rows, layout",
    [
        pytest.param(
            "DeepSeek-R1",
            8,
            32,
            Parallel(data=2, tensor=4, context=4, expert=8),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "DeepSeek-R1",
            16,
            32,
            Parallel(tensor=16, context=16, expert=16),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Kimi-K2", 16, 32, Parallel(tensor=16, context=16, expert=16), marks=pytest.mark.slow
        ),
        # Experts by columns: with whole ones a GPU has the shared expert too, and no room.
        pytest.param("Kimi-K2", 8, 8, Parallel(tensor=8, context=8), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_layout_is_planned_for_each_gpu(name, gpus, rows, layout):
    limits = dataclasses.replace(LIMITS, batch=rows)
    found = plan(model_resolver.load(name), "h200", limits, parallel=layout)
    facts = dict(found.facts)
    assert facts["layout"] == layout.flags and found.reserve is not None and found.reserve >= 0
    whole = plan(model_resolver.load(name), "2000GiB", limits)
    assert found["weights"] < whole["weights"] / (gpus / 2)
    assert found["kv cache"] * gpus >= whole["kv cache"]


def test_the_best_layout_is_one_that_holds_the_most_tokens():
    model, memory = decoder("DeepSeek-V2-Lite"), known_device("24GiB")
    limits = Limits(batch=256, max_model_len=32768)
    best = best_layout("", model, memory, limits, 2)
    assert best.context == 2 or best.data == best.expert == 2
    assert not list(layouts_that_fit(model, known_device("8GiB"), limits, 2))


def test_a_layout_that_holds_no_row_at_full_length_is_not_the_best():
    model, limits = decoder("DeepSeek-V2-Lite"), Limits(batch=1, max_model_len=163840)
    best = best_layout("", model, known_device("21GiB"), limits, 2)
    assert best.context == 2  # of 163,840 tokens; --tensor 2 holds 125,056
    assert not list(layouts_that_fit(model, known_device("19GiB"), limits, 2))
