"""In which order steps are lowered and compiled, and what an error leaves behind."""

import gc
import threading
import types

import pytest

from jaxattn.engine.compilation import compiler, sharded_step
from jaxattn.engine.compilation.compiler import _compile_steps
from jaxattn.engine.steps.model_steps import ModelStep
from jaxattn.engine.steps.step_catalog import entry_points
from jaxattn.limits import Limits


class Step(str):
    """A step that is nothing but its name."""


STEPS = [Step(name) for name in ("prefill", "decode", "sample")]


def test_one_thread_lowers_and_others_compile_meanwhile():
    decode_is_lowered, lowered = threading.Event(), []

    def lower(step):
        lowered.append((step, threading.get_ident()))
        if step == "decode":
            decode_is_lowered.set()
        return f"text of {step}"

    def compiled(step, text):
        assert text == f"text of {step}" and threading.get_ident() != lowered[0][1]
        assert decode_is_lowered.wait(10)  # prefill's compiling does not hold it up
        return f"executable of {step}"

    found = _compile_steps(STEPS, None, lower, compiled, None, 2)
    assert found == {step: f"executable of {step}" for step in STEPS}
    assert [step for step, _ in lowered] == STEPS
    assert {thread for _, thread in lowered} == {threading.get_ident()}


def test_what_is_kept_is_neither_lowered_nor_compiled():
    class Kept:
        def load(self, name):
            return None if name == "decode" else f"kept {name}"

    told = []
    found = _compile_steps(
        STEPS, Kept(), str.upper, lambda step, text: text, lambda *now: told.append(now), 1
    )
    assert found == {"prefill": "kept prefill", "decode": "DECODE", "sample": "kept sample"}
    assert [(name, seconds is None) for name, seconds in told] == [
        (name, begins) for name in ("prefill", "sample", "decode") for begins in (True, False)
    ]


@pytest.mark.parametrize("where", ["lower", "compile"])
def test_after_an_error_nothing_more_is_compiled_and_garbage_is_looked_for(where):
    done, may_end = [], threading.Event()

    def lower(step):
        if (where, step) == ("lower", "decode"):
            may_end.set()
            raise ValueError("decode")
        return step

    def compiled(step, text):
        if where == "compile":
            raise ValueError(step)
        assert may_end.wait(10)
        done.append(step)

    with pytest.raises(ValueError):
        _compile_steps(STEPS, None, lower, compiled, None, 1)
    assert set(done) <= {"prefill"}  # which had begun, or not yet
    assert gc.isenabled()


def test_a_step_is_compiled_when_its_kernels_are(monkeypatch):
    order, decode_is_lowered = [], threading.Event()

    class Beside:
        def __init__(self, pool, device):
            self.pool, self.device = pool, device

        def compile(self, text):
            def kernel():
                assert self.device == "gpu 0" and decode_is_lowered.wait(10)
                order.append(f"kernel of {text}")
                raise ValueError("the step has the same error, with its name")

            return [self.pool.submit(kernel)] if text == "prefill" else []

    def lower(step):
        if step == "decode":
            decode_is_lowered.set()
        return step

    monkeypatch.setattr(compiler, "ParallelCompiler", Beside)
    _compile_steps(STEPS, None, lower, lambda step, text: order.append(step), None, 1, "gpu 0")
    assert order == ["kernel of prefill", *STEPS]


@pytest.mark.parametrize("devices", [1, 2])
def test_prefill_records_loops_in_graphs_on_one_device(devices, monkeypatch):
    asked, limits = {}, Limits(batch=2, max_model_len=32, prefill_chunk=16)
    monkeypatch.setattr(sharded_step, "model_step", lambda *_: None)
    monkeypatch.setattr(sharded_step, "_results", lambda *_: ())
    monkeypatch.setattr(
        sharded_step, "jit_step", lambda _, *, prefill, **options: asked.update(prefill=prefill)
    )
    group = None if devices == 1 else types.SimpleNamespace(shardings=lambda specs: specs)
    for step in entry_points(limits):
        if isinstance(step, ModelStep):
            sharded_step.jitted_step(step, None, limits, None, None, "gpu", group)
            assert asked["prefill"] == (step.kind == "prefill" and devices == 1)
    assert asked
