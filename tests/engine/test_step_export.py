"""A decode step is lowered once for all executables that hold it, where it can be exported."""

import jax
import numpy as np
import pytest

from jaxattn.engine.compilation import compiler
from jaxattn.engine.compilation.sharded_step import jitted_step, model_step
from jaxattn.engine.compilation.step_export import DecodeStepExporter, decode_of
from jaxattn.engine.engine import Engine
from jaxattn.engine.runtime.process_state import PROCESS_STATE
from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.engine.steps.model_steps import ModelStep
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.limits import Limits
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
    return [step for step in all_steps(limits) if decode_of(step)]


def test_every_executable_with_a_decode_step_names_the_same_one():
    [one] = {decode_of(step) for step in decodes(LIMITS)}
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

    model.traced, lowered = 0, DecodeStepExporter(step_of, "cpu")
    for step in decodes(LIMITS):
        jitted = jitted_step(step, made, LIMITS, tree, None, "cpu", None, lowered)
        jitted.trace(*step.arguments(made, LIMITS, packed))
    assert model.traced == times


@pytest.mark.slow(
    reason="an export that changes a step; found by the count of traces there and reference "
    "tokens in cli/test_serve_folder too"
)
def test_tokens_are_those_of_steps_that_are_lowered_anew(monkeypatch):
    params, requests = params_of(SMALLEST), prompts(5)
    with Engine(Hybrid(SMALLEST), params, LIMITS) as engine:
        wanted = [each.tokens for each in engine.generate(requests)]
        monkeypatch.setattr(compiler, "DecodeStepExporter", lambda *_: None)
        monkeypatch.setattr(PROCESS_STATE, "steps", {})
        with Engine(Hybrid(SMALLEST), params, LIMITS) as other:
            assert other.executables.keys() == engine.executables.keys()
            assert other.executables is not engine.executables
            assert [each.tokens for each in other.generate(requests)] == wanted
