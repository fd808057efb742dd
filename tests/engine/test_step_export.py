"""A decode step is lowered once for all executables that hold it, where it can be exported. Other
processes lower what this one would."""

import contextlib

import jax
import numpy as np
import pytest

from jaxattn.engine.compilation import compiler, lowering_pool
from jaxattn.engine.compilation.lowering_pool import LoweringPool
from jaxattn.engine.compilation.lowering_process import LoweringSetup
from jaxattn.engine.compilation.sharded_step import jitted_step, model_step
from jaxattn.engine.compilation.step_export import StepExporter, model_step_of
from jaxattn.engine.engine import Engine
from jaxattn.engine.runtime.process_state import PROCESS_STATE
from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.engine.steps.model_steps import ModelStep
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.memory.limits import Limits
from jaxattn.models import Hybrid
from tests.helpers.engine_cases import SMALLEST, params_of, prompts

LIMITS = Limits(batch=2, max_model_len=128, prefill_chunk=16, steps_per_round=2)


class Counting(Hybrid):
    """Counts how often its decode step is traced."""

    traced = 0

    def decode(self, *given, **options):
        type(self).traced += 1
        return super().decode(*given, **options)


class Calling(Counting):
    """Calls back to the host, which no export takes."""

    def decode(self, params, state, batch, **options):
        logits, state = super().decode(params, state, batch, **options)
        shape = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
        return jax.pure_callback(lambda x: np.asarray(x), shape, logits), state


def decodes(limits):
    held = [(step, model_step_of(step)) for step in all_steps(limits)]
    return [step for step, entry in held if entry and entry.kind == "decode"]


def test_every_executable_with_a_decode_step_names_the_same_one():
    [one] = {model_step_of(step) for step in decodes(LIMITS)}
    assert one == ModelStep("decode", 2, 1) and len(decodes(LIMITS)) == 4
    assert not decodes(Limits(speculate=1))[1:]  # rounds with drafts decode several tokens


@pytest.mark.parametrize("model, times", [(Counting, 1), (Calling, 5)])
def test_it_is_traced_once_where_it_can_be_exported(model, times):
    """Else once for each executable, behind the attempt."""
    made, packed = model(SMALLEST), packed_shapes(Hybrid(SMALLEST))
    tree = jax.tree.structure(packed)

    def step_of(entry):
        function = model_step(entry, made, LIMITS, tree, None, None)
        return function, entry.arguments(made, LIMITS, packed)

    model.traced, lowered = 0, StepExporter(step_of, "cpu")
    for step in decodes(LIMITS):
        jitted = jitted_step(step, made, LIMITS, tree, None, "cpu", None, lowered)
        jitted.trace(*step.arguments(made, LIMITS, packed))
    assert model.traced == times


def pool_of(model, limits, entries):
    device = jax.devices()[0]
    setup = LoweringSetup.of(model, limits, packed_shapes(Hybrid(SMALLEST)), None, device)
    return contextlib.closing(LoweringPool(setup, entries, 1))


def test_another_process_lowers_the_same():
    model, packed = Hybrid(SMALLEST), packed_shapes(Hybrid(SMALLEST))
    [entry] = {model_step_of(step) for step in decodes(LIMITS)}
    given = entry.arguments(model, LIMITS, packed)

    def step_of(entry):
        return model_step(entry, model, LIMITS, jax.tree.structure(packed), None, None), given

    here, there = StepExporter(step_of, "cpu"), StepExporter(step_of, "cpu")
    with pool_of(model, LIMITS, [entry]) as there.elsewhere:
        taken = there.elsewhere.take(entry)
        assert taken is not None and there(entry) is not None
    own, other = (jax.jit(lambda *x, f=f: f(*x)).lower(*given) for f in (here(entry), there(entry)))
    assert own.as_text() == other.as_text()


def test_a_model_that_another_process_cannot_have_is_lowered_here(monkeypatch):
    [entry] = {model_step_of(step) for step in decodes(LIMITS)}
    monkeypatch.setattr(lowering_pool, "MODULE", "no_such_module")
    with pool_of(Hybrid(SMALLEST), LIMITS, [entry]) as pool:
        pool.wait([entry])
        assert pool.done(entry) and pool.take(entry) is None

    class Own(Hybrid):
        """Of a function, so that no process finds it by its name."""

    setup = LoweringSetup.of(Own(SMALLEST), LIMITS, packed_shapes(Hybrid(SMALLEST)), None, None)
    monkeypatch.setattr(lowering_pool, "FEWEST_STEPS", 1)
    monkeypatch.setattr(lowering_pool, "FEWEST_CORES", 1)
    assert LoweringPool.start(setup, [entry]) is None


@pytest.mark.slow(
    reason="an export that changes a step; found by the count of traces there and reference "
    "tokens in cli/test_serve_folder too"
)
def test_tokens_are_those_of_steps_that_are_lowered_anew(monkeypatch):
    params, requests = params_of(SMALLEST), prompts(5)
    with Engine(Hybrid(SMALLEST), params, LIMITS) as engine:
        wanted = [each.tokens for each in engine.generate(requests)]
        monkeypatch.setattr(compiler, "StepExporter", lambda *_: None)
        monkeypatch.setattr(PROCESS_STATE, "steps", {})
        with Engine(Hybrid(SMALLEST), params, LIMITS) as other:
            assert other.executables.keys() == engine.executables.keys()
            assert other.executables is not engine.executables
            assert [each.tokens for each in other.generate(requests)] == wanted
