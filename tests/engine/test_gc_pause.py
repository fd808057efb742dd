"""Python does not look for garbage in the middle of a round, and does so again behind it."""

import gc
import threading

import pytest

from jaxattn import Engine
from jaxattn.engine.runtime import gc_pause
from jaxattn.models import Hybrid
from tests.helpers.engine_cases import LIMITS, SMALLEST, kept_steps, params_of, prompts
from tests.helpers.fresh_process import said_by_a_fresh_process


@pytest.fixture(scope="module")
def engine():
    kept_steps(LIMITS)
    return Engine(Hybrid(SMALLEST), params_of(SMALLEST), LIMITS)


def test_a_round_of_generate_is_not_searched(engine):
    inside = []
    engine.generate(prompts(3), on_token=lambda *_: inside.append(gc.isenabled()))
    assert inside and not any(inside) and gc.isenabled()


def test_it_is_searched_again_after_an_error_of_a_callback(engine):
    with pytest.raises(ZeroDivisionError):
        engine.generate(prompts(3), on_token=lambda *_: 1 / 0)
    assert gc.isenabled()


def test_who_has_turned_the_search_off_keeps_it_off(engine):
    gc.disable()
    try:
        engine.generate(prompts(3))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_two_threads_leave_the_search_as_it_was(monkeypatch):
    """One leaves while the other is coming in."""
    inside, leave, looked = threading.Event(), threading.Event(), gc.isenabled

    def first():
        with gc_pause.gc_paused():
            inside.set()
            leave.wait(10)

    def isenabled():
        found = looked()
        leave.set()
        other.join(0.2)  # it waits for this thread, or is through
        return found

    other = threading.Thread(target=first)
    other.start()
    inside.wait(10)
    try:
        monkeypatch.setattr(gc, "isenabled", isenabled)
        with gc_pause.gc_paused():
            pass
        other.join(10)
        assert looked()
    finally:
        gc.enable()


def test_what_a_callback_keeps_is_searched_between_rounds(engine):
    searches, keep = [], []

    def searched(phase, _):
        searches.append(len(keep))

    often = gc.get_threshold()
    gc.set_threshold(10_000, 20, 20)  # the suite's own is ten times as much
    gc.callbacks.append(searched)
    try:
        engine.generate(prompts(3), on_token=lambda *_: keep.extend([] for _ in range(1000)))
    finally:
        gc.callbacks.remove(searched)
        gc.set_threshold(*often)
    assert any(0 < kept < len(keep) for kept in searches)


def test_what_is_kept_is_not_searched():
    # In a process of its own: this one's objects have to be found.
    assert said_by_a_fresh_process("garbage collector").split() == ["True"] * 3
