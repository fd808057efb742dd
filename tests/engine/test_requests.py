"""Requests one by one: `add`, `abort` and `step`, how rows end, and how an engine ends."""

import dataclasses
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import Engine, Limits, Request
from jaxattn.engine.engine import EngineBusyError
from jaxattn.engine.requests.outputs import (
    FinishEvent,
    FinishReason,
    GenerationInterrupted,
    TokenEvent,
)
from jaxattn.engine.startup.engine_build import prepare
from jaxattn.engine.startup.executable_memory import from_compiled
from jaxattn.engine.steps.model_steps import rounds
from jaxattn.engine.steps.step_catalog import entry_points
from jaxattn.memory.plan import nbytes
from jaxattn.models import Hybrid
from jaxattn.plan import plan
from tests.helpers.engine_cases import (
    FLOAT32,
    LIMITS,
    SMALLEST,
    TIGHT,
    kept_steps,
    params_of,
    prompts,
    resized_params,
    with_steps,
)

pytestmark = pytest.mark.lazy_steps

MODEL = Hybrid(SMALLEST)


def text_of(tokens) -> str:
    return bytes(tokens).decode("latin-1")


@pytest.fixture(scope="module")
def params():
    return params_of(SMALLEST)


@pytest.fixture(scope="module")
def engine(params):
    kept_steps(LIMITS)
    return Engine(MODEL, params, LIMITS, detokenize=text_of)


def drained(engine):
    """All events until nothing is left to do, and the tokens and completions among them."""
    events = []
    while engine.busy:
        events += engine.step()
    tokens = {}
    for event in events:
        if isinstance(event, TokenEvent):
            tokens.setdefault(event.request.id, []).append(event.token)
    done = {e.completion.request.id: e.completion for e in events if isinstance(e, FinishEvent)}
    return tokens, done


def test_steps_give_what_generate_gives(engine):
    wanted = engine.generate(prompts(5))
    ids = [engine.add(request) for request in prompts(5)]
    tokens, done = drained(engine)
    assert len(set(ids)) == 5 and ids == sorted(ids)
    assert [tuple(tokens[id]) for id in ids] == [each.tokens for each in wanted]
    assert [done[id].tokens for id in ids] == [each.tokens for each in wanted]
    assert engine.step() == []


def test_a_request_may_come_while_others_run(engine):
    [alone] = engine.generate([Request(b"late", max_tokens=5)])
    engine.add(Request(b"early", max_tokens=9))
    engine.step()
    late = engine.add(Request(b"late", max_tokens=5))
    tokens, _ = drained(engine)
    assert tuple(tokens[late]) == alone.tokens


def test_an_aborted_request_frees_its_row_and_gives_what_it_has(engine):
    running, waiting = engine.add(Request(b"x", max_tokens=100)), None
    for _ in range(5):
        engine.step()
    while engine.scheduler.limits.batch > len(engine.scheduler.rows) + len(
        engine.scheduler.waiting
    ):
        waiting = engine.add(Request(b"y" * 20, max_tokens=100))
    waiting = engine.add(Request(b"z", max_tokens=100))
    assert engine.abort(running) and engine.abort(waiting)
    assert not engine.abort(running) and not engine.abort(12345)
    for id in [queued.request.id for queued in engine.scheduler.waiting]:
        engine.abort(id)
    for row in list(engine.scheduler.rows.values()):
        engine.abort(row.request.id)
    _, done = drained(engine)
    assert {each.finish_reason for each in done.values()} == {FinishReason.ABORTED}
    assert len(done[running].tokens) >= 4 and done[waiting].tokens == ()
    assert engine.scheduler.pages.in_use == engine.scheduler.slots.in_use == 0


def test_any_of_several_stop_tokens_ends_a_row(engine):
    [whole] = engine.generate([Request(b"stop", max_tokens=12)])
    stop = whole.tokens[6]
    first = whole.tokens.index(stop)
    unused = next(token for token in range(256) if token not in whole.tokens)
    [done] = engine.generate([Request(b"stop", max_tokens=12, stop_tokens=[unused, stop])])
    assert done.tokens == whole.tokens[:first]
    assert (done.finish_reason, done.detail) == (FinishReason.STOP, stop)


def test_a_stop_string_ends_a_row_with_the_token_that_completes_it(engine):
    [whole] = engine.generate([Request(b"stop", max_tokens=12)])
    text = text_of(whole.tokens[5:8])
    end = text_of(whole.tokens).index(text) + len(text)
    request = Request(b"stop", max_tokens=12, stop_strings=("never there", text))
    [done] = engine.generate([request])
    assert done.tokens == whole.tokens[:end]
    assert (done.finish_reason, done.detail) == ("stop", text)


def test_without_detokenize_a_stop_string_is_refused_with_words(params):
    plain = Engine(MODEL, params, LIMITS)
    [done] = plain.generate([Request(b"a", stop_strings=["."])])
    assert done.finish_reason == "refused" and "detokenize" in done.detail


def test_length_says_which_limit_it_was(engine):
    [short] = engine.generate([Request(b"a", max_tokens=3)])
    assert (short.finish_reason, short.detail) == ("length", "max_tokens")
    kept_steps(TIGHT, config=FLOAT32)  # room for a row at full length
    exact = Hybrid(FLOAT32)
    packed = exact.pack(params_of(FLOAT32))
    [cut] = Engine(exact, packed, TIGHT).generate([Request(b"a" * 251, max_tokens=99)])
    assert (len(cut.tokens), cut.detail) == (5, "max_model_len")


def test_a_seed_decides_the_draws_and_an_id_does_not(engine):
    def drawn(**options):
        return engine.generate([Request(b"draw", max_tokens=9, temperature=2.0, **options)])[
            0
        ].tokens

    assert drawn(seed=5, id=1) == drawn(seed=5, id=99)
    assert drawn(seed=5) != drawn(seed=6)
    assert drawn(id=1) != drawn(id=2)  # without a seed the id is one


def test_a_rows_draws_do_not_depend_on_filters_of_other_rows(engine):
    plain = Request(b"plain", max_tokens=8, temperature=1.5, seed=3)
    sorts = Request(b"sorts", max_tokens=8, temperature=1.0, top_k=4, top_p=0.9, seed=4)
    together = engine.generate([plain, sorts])
    alone = [engine.generate([request])[0] for request in (plain, sorts)]
    assert [each.tokens for each in together] == [each.tokens for each in alone]


def test_a_damaged_parameter_ends_rows_with_a_reason_that_says_so(params):
    damaged = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), params)
    [done] = Engine(MODEL, damaged, LIMITS).generate([Request(b"a")])
    assert done.finish_reason == FinishReason.NOT_FINITE and done.tokens == ()
    assert "NaN" in done.detail


# --- misuse


def test_generate_in_a_callback_is_named_as_such(engine):
    def again(request, token):
        engine.generate(prompts(1))

    with pytest.raises(EngineBusyError, match="generate was called from a callback"):
        engine.generate(prompts(1), on_token=again)


def test_a_callback_may_abort(engine):
    def stop(request, token):
        engine.abort(request.id)

    [done] = engine.generate([Request(b"a", max_tokens=50)], on_token=stop)
    # A round reads the last chunk of a prompt and decodes, so the callback comes one token late.
    assert done.finish_reason == "aborted" and 1 <= len(done.tokens) <= 2


def test_generate_waits_for_requests_that_were_added(engine):
    id = engine.add(Request(b"a"))
    with pytest.raises(EngineBusyError, match="some added requests"):
        engine.generate(prompts(1))
    engine.abort(id)
    drained(engine)


def test_a_prompt_that_is_changed_while_it_is_read_stays_what_it_was(engine):
    prompt = list(b"a prompt that is read in several chunks of sixteen tokens each")
    request = Request(prompt, max_tokens=4)
    [wanted] = engine.generate([Request(bytes(prompt), max_tokens=4)])
    prompt[20:] = [1] * 30
    assert engine.generate([request])[0].tokens == wanted.tokens


@pytest.mark.parametrize("wrong", [b"bytes", "text", [1, 2], None])
def test_what_is_no_request_is_named(engine, wrong):
    with pytest.raises(TypeError, match="must be a jaxattn.Request"):
        engine.generate([wrong])
    with pytest.raises(TypeError, match="must be a jaxattn.Request"):
        engine.add(wrong)


@pytest.mark.parametrize("requests", [None, 3])
def test_what_is_no_list_is_named(engine, requests):
    with pytest.raises(TypeError, match="requests must be a list of .*got (NoneType|int)"):
        engine.generate(requests)


@pytest.mark.parametrize("name", ["on_token", "on_finish"])
def test_what_cannot_be_called_is_named_before_anything_runs(engine, name):
    with pytest.raises(TypeError, match=f"generate: {name} must be callable, got str"):
        engine.generate([Request(b"a", max_tokens=2)], **{name: "print"})
    assert not engine.busy


def test_devices_are_named(params):
    for devices in ("gpu", ["cpu"], [None]):
        with pytest.raises(TypeError, match="devices must be a jax.Device or a sequence"):
            prepare(MODEL, params, LIMITS, devices)


def test_an_id_in_use_is_refused(engine):
    engine.add(Request(b"a", id=7, max_tokens=3))
    with pytest.raises(ValueError, match="id 7 is running or waiting"):
        engine.add(Request(b"b", id=7))
    drained(engine)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"implementation": "cuda"}, ValueError, "implementation must be one of .* got 'cuda'"),
        ({"limits": {}}, TypeError, "limits must be a jaxattn.Limits, got dict"),
        ({"model": SMALLEST}, TypeError, "model must be a jaxattn.models.Model.*got HybridConfig"),
        ({"params": {}}, ValueError, "parameter 'embedding.* is missing"),
        (
            {"params": MODEL.param_shapes()},
            TypeError,
            "params are shapes, but an engine needs arrays",
        ),
        ({"limits": Limits(max_model_len=10**6)}, ValueError, "max_position_embeddings=256"),
    ],
)
def test_wrong_arguments_fail_at_once_and_by_name(params, change, error, message):
    arguments = {"model": MODEL, "params": params, "limits": LIMITS} | change
    with pytest.raises(error, match=message):
        Engine(**arguments, on_compile=lambda name, seconds: pytest.fail("compiled"))


def test_parameters_of_another_configuration_are_named(params):
    other = resized_params(dataclasses.replace(SMALLEST, hidden_size=32))
    with pytest.raises(ValueError, match=r"\[256, 32\]; expected bfloat16\[256, 16\]"):
        Engine(MODEL, other, LIMITS)


# --- errors and interrupts at any point


def failing(engine, monkeypatch, name, error, *, after):
    """The engine's step raises, before or after it has run."""
    real = engine.executables[name]

    def step(*args):
        found = real(*args) if after else None
        if found or not after:
            raise error

    with_steps(engine, {**engine.executables, name: step})
    return lambda: with_steps(engine, {**engine.executables, name: real})


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["prefill of 16 tokens beside 3 rows", "round of 3 rows: greedy"])
@pytest.mark.parametrize(
    "error, reason",
    [(RuntimeError("the device is lost"), "failed"), (KeyboardInterrupt(), "interrupted")],
    ids=["error", "interrupt"],
)
def test_a_step_that_fails_ends_its_rows_and_serves_what_waits(
    params, monkeypatch, after, kind, error, reason
):
    engine = Engine(MODEL, params, LIMITS)
    wanted = engine.generate([Request(b"waits", max_tokens=5)])
    first = engine.add(Request(b"x" * 20, max_tokens=60))
    for _ in range(1 if kind.startswith("prefill") else 4):
        engine.step()
    waiting = [engine.add(Request(b"waits", max_tokens=5)) for _ in range(3)]
    mend = failing(engine, monkeypatch, kind, error, after=after)
    with pytest.raises(type(error)):
        while True:
            engine.step()
    mend()
    _, done = drained(engine)
    assert done[first].finish_reason == reason
    assert {done[id].finish_reason for id in waiting} <= {reason, "length"}
    served = [done[id] for id in waiting if done[id].finish_reason == "length"]
    assert all(each.tokens == wanted[0].tokens for each in served)
    assert engine.scheduler.pages.in_use == engine.scheduler.slots.in_use == 0
    assert engine.generate([Request(b"waits", max_tokens=5)])[0].tokens == wanted[0].tokens


def test_after_an_error_of_the_device_the_state_is_allocated_again(params):
    """What its steps left in the buffers, or whether they can be read at all, nobody knows."""
    engine = Engine(MODEL, params, LIMITS)
    [wanted] = engine.generate([Request(b"again", max_tokens=5)])
    name, real, before = "round of 3 rows: greedy", engine.executables, engine.state
    damaged = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), before.arena)

    def lost(*args):
        engine._runner.state = dataclasses.replace(engine._runner.state, arena=damaged)
        raise jax.errors.JaxRuntimeError("INTERNAL: an illegal memory access")

    with_steps(engine, {**real, name: lost})
    with pytest.raises(jax.errors.JaxRuntimeError, match="illegal"):
        engine.generate([Request(b"again", max_tokens=5)])
    with_steps(engine, real)
    assert engine.generate([Request(b"again", max_tokens=5)])[0].tokens == wanted.tokens
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(damaged) if leaf.size)
    assert not engine.seal.counts


def test_an_interrupt_with_the_last_token_does_not_lose_the_row(engine):
    [whole] = engine.generate([Request(b"last", max_tokens=8)])
    seen = []

    def interrupt(request, token):
        seen.append(token)
        if len(seen) == 8:
            raise KeyboardInterrupt

    with pytest.raises(GenerationInterrupted) as caught:
        engine.generate([Request(b"last", max_tokens=8)], on_token=interrupt)
    [done] = caught.value.completions
    assert (done.tokens, done.finish_reason) == (whole.tokens, "length")


def test_another_thread_gets_no_state_and_no_second_one(engine):
    inside, go_on, found = threading.Event(), threading.Event(), []

    def hold(request, token):
        inside.set()
        assert go_on.wait(60)

    thread = threading.Thread(target=engine.generate, args=(prompts(1),), kwargs={"on_token": hold})
    thread.start()
    assert inside.wait(60)
    for use in (
        lambda: engine.state,
        engine.start,
        engine.close,
        lambda: engine.add(Request(b"a")),
    ):
        with pytest.raises(EngineBusyError):
            found.append(use())
    go_on.set()
    thread.join()
    assert not found


def test_a_callback_cannot_close_the_engine(engine):
    with pytest.raises(EngineBusyError, match="close was called from a callback"):
        engine.generate(prompts(1), on_token=lambda request, token: engine.close())


def test_ids_are_kept_apart_from_places(engine):
    done = engine.generate([Request(b"a", id=1, max_tokens=1), Request(b"b", max_tokens=1)])
    assert len({each.request.id for each in done}) == 2 and done[0].request.id == 1
    with pytest.raises(ValueError, match="requests 0 and 2 have the same id 4"):
        engine.generate([Request(b"a", id=4), Request(b"b"), Request(b"c", id=4)])
    engine.add(Request(b"a", id=2**31 - 1, max_tokens=1))
    engine.add(Request(b"b", max_tokens=1))
    drained(engine)


def test_parameters_of_numpy_are_put_on_the_device_once(params):
    host = jax.tree.map(np.asarray, params)
    engine = Engine(MODEL, host, LIMITS)
    assert all(isinstance(leaf, jax.Array) for leaf in engine._weights.leaves)
    assert engine.generate(prompts(1))[0].tokens


def test_an_engine_keeps_what_is_packed_and_not_what_was_given():
    given = params_of(SMALLEST)
    norm = weakref.ref(jax.tree.leaves(given["segments"][0]["layers"][0]["norm"])[0])
    engine = Engine(MODEL, given, LIMITS)
    assert norm() is not None
    del given
    gc.collect()
    assert norm() is None and engine.generate(prompts(1))[0].tokens


def test_parameters_come_once(params):
    engine = Engine(MODEL, params, LIMITS)
    engine.start()
    with pytest.raises(RuntimeError, match="is already running; create another one"):
        engine.start(params)


# --- beginning and end


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def test_preparing_takes_shapes_and_allocates_nothing(params, engine):
    wanted = engine.generate(prompts(2))
    before = live_bytes()
    prepared = prepare(MODEL, MODEL.param_shapes(), LIMITS)
    late = Engine.of(prepared)
    assert live_bytes() == before
    with pytest.raises(ValueError, match=r"no parameters: pass them to start\(params\)"):
        late.start()
    with pytest.raises(ValueError, match="is missing"):
        late.start({})
    late.start(params)
    assert [each.tokens for each in late.generate(prompts(2))] == [e.tokens for e in wanted]
    assert late.plan.total == engine.plan.total


def test_the_engine_takes_what_was_planned_without_a_device(params):
    made = plan(MODEL, "2GiB", LIMITS)
    engine = Engine(MODEL, params, LIMITS)
    for name in ("weights", "rows", "arena", "kv cache"):
        assert made[name] == engine.plan[name]
    state = engine.state
    assert (
        made["kv cache"] == state.array("kv_cache").nbytes and made["arena"] == state.arena.nbytes
    )
    for step in (entry_points(LIMITS)[0], rounds(LIMITS, LIMITS.batch)[0]):
        taken = from_compiled(engine.executables[str(step)], nbytes(step.given(MODEL, LIMITS)))
        assert 0 < taken.temp <= made["xla temp"]
        assert taken.in_out <= made["step inputs and outputs"]


def test_memory_comes_back_when_the_engine_is_deleted(params):
    kept_steps(LIMITS)
    gc.collect()
    gc.disable()  # nothing may wait for the cyclic collector
    try:
        before = live_bytes()
        engine = Engine(MODEL, params, LIMITS)
        engine.generate(prompts(2))
        assert live_bytes() > before
        gone = weakref.ref(engine)
        del engine
        assert gone() is None and live_bytes() == before
    finally:
        gc.enable()


def test_a_closed_engine_holds_nothing_and_says_so(params):
    before = live_bytes()
    with Engine(MODEL, params, LIMITS) as engine:
        engine.generate(prompts(1))
    assert live_bytes() == before
    engine.close()  # twice is once
    for use in (engine.step, engine.start, lambda: engine.add(Request(b"a"))):
        with pytest.raises(RuntimeError, match="this engine is closed; create a new one"):
            use()
    assert not engine.busy


def test_requests_added_before_the_start_are_served(params):
    engine = Engine(MODEL, params, LIMITS)
    id = engine.add(Request(np.array([65, 66]), max_tokens=3))
    _, done = drained(engine)
    assert len(done[id].tokens) == 3


def test_a_row_ends_with_the_token_of_which_its_request_says_so(engine):
    """And one step more has been sent for it by then, none after that."""
    [whole] = engine.generate([Request(b"def f(", max_tokens=20)])
    seen = []

    def ends_at(token):
        seen.append(token)
        return len(seen) == 7

    [found] = engine.generate([Request(b"def f(", max_tokens=20, ends_at=ends_at)])
    assert (found.finish_reason, found.detail) == (FinishReason.STOP, "ends_at")
    assert found.tokens == whole.tokens[:7] == tuple(seen)
    assert engine.stats.decode_steps == 7  # six for the tokens behind the first, and one


@pytest.mark.usefixtures("no_forecast")
def test_what_ends_a_row_is_not_asked_again_after_a_preemption():
    kept_steps(TIGHT, config=FLOAT32)
    seen = {place: [] for place in range(3)}

    def ends_at(place):
        return lambda token: seen[place].append(token) or False

    with Engine(Hybrid(FLOAT32), params_of(FLOAT32), TIGHT) as engine:
        done = engine.generate(
            [
                Request(bytes([65 + place] * 60), max_tokens=60, ends_at=ends_at(place))
                for place in seen
            ]
        )
        assert engine.stats.preemptions
    assert [each.tokens for each in done] == [tuple(tokens) for tokens in seen.values()]


def test_an_error_of_what_ends_a_row_ends_all_rows(engine):
    def ends_at(token):
        raise ZeroDivisionError

    ids = [engine.add(Request(b"a", max_tokens=9, ends_at=ends_at))]
    ids.append(engine.add(Request(b"b", max_tokens=9)))
    with pytest.raises(ZeroDivisionError):
        drained(engine)
    _, done = drained(engine)
    assert [done[id].finish_reason for id in ids] == [FinishReason.FAILED] * 2
    assert len(engine.generate([Request(b"a", max_tokens=3)])[0].tokens) == 3


def test_what_cannot_be_called_ends_no_row():
    with pytest.raises(TypeError, match="ends_at must be callable, got 5"):
        Request(b"a", ends_at=5)
