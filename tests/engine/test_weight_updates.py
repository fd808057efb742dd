"""New weights in a running engine: whose buffers they take, and which tokens they give."""

import dataclasses
import gc
import threading
import tracemalloc

import jax
import numpy as np
import pytest
from flax import nnx

from jaxattn import Engine, Limits, Request
from jaxattn.engine.engine import EngineBusyError
from jaxattn.engine.requests.outputs import FinishEvent, FinishReason
from jaxattn.engine.startup.memory_plan import fill, packed_shapes, plan_engine
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.plan import MemoryBudget, PlanError
from jaxattn.models import Hybrid
from tests.helpers.engine_cases import EXACT, params_of, pretend
from tests.helpers.engine_cases import ONE_BY_ONE as LIMITS

PROMPT = bytes((7 * j + j * j) % 256 for j in range(70))


def copied(tree):
    return jax.tree.map(lambda x: x.copy(), tree)


@pytest.fixture(scope="module")
def params():
    return [params_of(EXACT, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def engine(params):
    with Engine(Hybrid(EXACT), copied(params[0]), LIMITS, strict=True) as engine:
        engine.start()
        engine.update(params[0])
        yield engine


@pytest.fixture(scope="module")
def expected(engine, params):
    """What each of the weights says, of rows that are served alone."""
    found = []
    for own in params:
        engine.update(own)
        found.append([each.tokens for each in engine.generate(requests())])
    assert found[0] != found[1]
    return found


def requests(count=3, **more):
    return [Request(PROMPT[i:], max_tokens=30 + i, id=i, **more) for i in range(count)]


def pointers(engine):
    return [x.unsafe_buffer_pointer() for x in engine._runner.weights if x.size]


def events_of(engine):
    found = []
    while engine.busy:
        found += engine.step()
    return found


def test_new_weights_answer_as_an_engine_that_was_made_with_them(engine, params, expected):
    for own, answers in zip(params, expected, strict=True):
        with Engine(Hybrid(EXACT), own, LIMITS) as other:
            assert [each.tokens for each in other.generate(requests())] == answers
        packed = jax.tree.leaves(engine.model.pack(own))
        engine.update(own)
        for new, wanted in zip(engine._runner.weights, packed, strict=True):
            np.testing.assert_array_equal(new, wanted)


def test_hundreds_of_updates_take_no_byte_and_compile_nothing(engine, params, caplog):
    engine.update(params[0])
    before = pointers(engine)

    def sizes():
        gc.collect()
        return len(jax.live_arrays()), sum(x.nbytes for x in jax.live_arrays())

    def updates(count):
        for n in range(count):
            version = engine.update(params[n % 2])
        assert version == engine.weights_version
        return sizes(), tracemalloc.get_traced_memory()[0]

    with jax.log_compiles(), caplog.at_level("WARNING"):
        arrays, _ = updates(200)
        tracemalloc.start()  # which makes an update take twice as long
        (_, host), (later, host_later) = updates(50), updates(50)
        tracemalloc.stop()
    assert later == arrays and host_later - host < 5_000
    assert "ompil" not in caplog.text and not engine.seal.messages
    assert pointers(engine) == before


def begun(engine, count=3, rounds=9, **more):
    """Requests with some tokens each, and one behind them that has not begun."""
    for each in requests(count, **more):
        engine.add(each)
    engine.add(Request(PROMPT[:20], max_tokens=5, id=9, priority=1))
    events = []
    for _ in range(rounds):
        events += engine.step()
    assert all(row.tokens for row in engine.scheduler.rows.values()) and engine.scheduler.waiting
    return events


def told(events):
    """id -> (tokens, their versions, the completion)."""
    found = {}
    for event in events:
        if isinstance(event, FinishEvent):
            done = event.completion
            own = found.setdefault(done.request.id, [[], []])
            own.append(done)
            assert list(done.tokens) == own[0]
        else:
            own = found.setdefault(event.request.id, [[], []])
            own[0].append(event.token)
            own[1].append(event.weights_version)
    return found


@pytest.mark.parametrize("speed", [{}, {"temperature": 0.8}])
def test_requests_that_have_begun_finish_with_the_weights_that_they_began_with(
    engine, params, expected, speed
):
    engine.update(params[0])
    alone = [each.tokens for each in engine.generate(requests(seed=3, **speed))]
    old = engine.weights_version
    events = begun(engine, seed=3, **speed)
    assert engine.update(params[1]) == old + 1
    [late] = engine.generate([Request(PROMPT[:20], max_tokens=5)]) if not engine.busy else [None]
    found = told(events + events_of(engine))
    for number in range(3):
        tokens, versions, done = found[number]
        assert tuple(tokens) == alone[number] and set(versions) == {old}
        assert (done.weights_version, done.older_tokens) == (old, 0)
    assert set(found[9][1]) == {old + 1} and late is None
    [same] = engine.generate([Request(PROMPT[:20], max_tokens=5)])
    assert tuple(found[9][0]) == same.tokens


def test_requests_that_have_begun_are_aborted_and_others_served(engine, params):
    engine.update(params[0])
    events = begun(engine)
    version = engine.update(params[1], in_flight="abort")
    found = told(events + events_of(engine))
    for number in range(3):
        assert found[number][2].finish_reason is FinishReason.ABORTED
        assert set(found[number][1]) == {version - 1}
    assert len(found[9][0]) == 5 and set(found[9][1]) == {version}


def test_requests_that_have_begun_go_on_from_caches_of_the_new_weights(engine, params):
    """Behind the update a row says what the new weights say of its text so far."""
    engine.update(params[0])
    events = begun(engine)
    version = engine.update(params[1], in_flight="recompute")
    found = told(events + events_of(engine))
    for number in range(3):
        tokens, versions, done = found[number]
        first = versions.index(version)
        assert versions == sorted(versions) and set(versions) == {version - 1, version}
        assert done.older_tokens == first > 0 and len(tokens) == 30 + number
        asked = Request([*PROMPT[number:], *tokens[:first]], max_tokens=len(tokens) - first)
        assert list(engine.generate([asked])[0].tokens) == tokens[first:]


@pytest.mark.parametrize("gone", ["released", "deleted"])
def test_requests_that_cannot_be_finished_go_on_with_the_new_weights(engine, params, gone):
    shared = copied(params[0])
    engine.update(shared, share=True)
    events = begun(engine)
    if gone == "released":
        engine.release()
    else:
        jax.tree.leaves(shared)[0].delete()
    version = engine.update(params[1])
    engine.resume()
    found = told(events + events_of(engine))
    for number in range(3):
        tokens, versions, done = found[number]
        assert set(versions) == {version - 1, version} and len(tokens) == 30 + number
        assert done.older_tokens == versions.count(version - 1)


def test_no_prefix_of_old_weights_is_found(engine, params):
    for own in params * 2:
        engine.update(own)
        first, second = (engine.generate([Request(PROMPT, max_tokens=4)])[0] for _ in range(2))
        assert first.cached_tokens == 0 < second.cached_tokens and first.tokens == second.tokens


def test_all_differences_are_named_and_nothing_changes(engine, params):
    before, version = engine.generate(requests(1))[0].tokens, engine.weights_version
    wrong = nnx.to_pure_dict(params[1])
    wrong["embedding"] = wrong["embedding"][:5]
    wrong["norm"]["weight"] = wrong["norm"]["weight"].astype("bfloat16")
    wrong["more"] = wrong.pop("lm_head")
    gone = wrong["segments"][0]["layers"][0]["norm"]["weight"].copy()
    wrong["segments"][0]["layers"][0]["norm"]["weight"] = gone
    gone.delete()
    wrong["segments"][0]["layers"][1]["norm"]["weight"] = jax.ShapeDtypeStruct((16,), "float32")
    with pytest.raises(ValueError) as error:
        engine.update(wrong)
    for text in (
        "'embedding' is float32[5, 16]; expected float32[256, 16]",
        "'norm.weight' is bfloat16[16]; expected float32[16]",
        "'lm_head.weight' is missing; expected float32[16, 256]",
        "unexpected parameter 'more.weight'",
        "'segments.0.layers.0.norm.weight' was deleted",
        "'segments.0.layers.1.norm.weight' is a shape without an array",
    ):
        assert text in str(error.value)
    assert engine.weights_version == version
    assert engine.generate(requests(1))[0].tokens == before
    with pytest.raises(ValueError, match="in_flight must be one of 'finish', 'abort', 'recompute'"):
        engine.update(params[0], in_flight="wait")


@pytest.mark.parametrize("form", ["module", "dict", "numpy"])
def test_a_module_a_dict_and_arrays_of_the_host_are_taken(engine, params, expected, form):
    engine.update(params[0])
    given = {
        "module": lambda: engine.model.bind(params[1]),
        "dict": lambda: nnx.to_pure_dict(params[1]),
        "numpy": lambda: jax.tree.map(np.asarray, params[1]),
    }[form]()
    engine.update(given)
    assert [each.tokens for each in engine.generate(requests())] == expected[1]


def test_shared_arrays_are_read_where_they_are_and_never_donated(engine, params, expected):
    given = copied(params[1])
    own = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(given)}
    engine.update(given, share=True)
    assert own & set(pointers(engine))
    assert [each.tokens for each in engine.generate(requests())] == expected[1]
    engine.update(params[0])
    assert not own & set(pointers(engine))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), given, params[1])
    engine.update(given, share=True)
    jax.tree.leaves(given)[0].delete()
    with pytest.raises(RuntimeError, match="'embedding' was donated or deleted by its owner"):
        engine.generate(requests(1))
    engine.update(params[0])
    assert [each.tokens for each in engine.generate(requests())] == expected[0]


def test_the_maker_of_an_engine_keeps_its_parameters(params, expected):
    given = copied(params[0])
    with Engine(Hybrid(EXACT), given, LIMITS) as engine:
        engine.update(params[1])
        assert [each.tokens for each in engine.generate(requests())] == expected[1]
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), given, params[0])


def test_an_update_inside_a_step_or_of_another_thread_is_refused(engine, params):
    version, errors = engine.weights_version, []

    def update(*_):
        try:
            engine.update(params[0])
        except EngineBusyError as error:
            errors.append(str(error))

    engine.generate([Request(PROMPT, max_tokens=2)], on_token=update)
    assert errors == ["update was called from a callback of this engine"] * 2

    def elsewhere(*_):
        thread = threading.Thread(target=update)
        thread.start()
        thread.join()

    engine.generate([Request(PROMPT, max_tokens=1)], on_token=elsewhere)
    assert errors[2].startswith("update: another thread is using this engine")
    assert engine.weights_version == version


def test_a_released_engine_holds_no_cache_and_goes_on_where_it_was(engine, params, expected):
    engine.update(params[0])
    events, before = begun(engine), len(jax.live_arrays())
    state = sum(x.nbytes for x in jax.tree.leaves((engine._runner.state, engine._runner.rows)))
    live = sum(x.nbytes for x in jax.live_arrays())
    plan = engine.plan
    assert engine.release() == state
    assert live - sum(x.nbytes for x in jax.live_arrays()) >= state
    for call in (engine.step, lambda: engine.state):
        with pytest.raises(RuntimeError, match="call resume"):
            call()
    engine.resume()
    engine.resume()
    assert engine.plan is plan and len(jax.live_arrays()) <= before
    found = told(events + events_of(engine))
    assert [tuple(found[n][0]) for n in range(3)] == expected[0]


def test_an_engine_that_no_longer_fits_stays_released(engine, params, monkeypatch):
    plan, room = engine.plan, DeviceMemory("device", engine.plan.inside + 100)
    budget = MemoryBudget("device", room.total)
    monkeypatch.setattr(
        engine,
        "_build",
        dataclasses.replace(engine._build, plan=dataclasses.replace(plan, budget=budget)),
    )
    engine.release()
    weights = sum(x.nbytes for x in engine._weights.leaves)
    pretend(monkeypatch, dataclasses.replace(room, in_use=weights + 101))
    with pytest.raises(PlanError, match="other arrays hold 101 of the .* such as a trainer's"):
        engine.resume()
    with pytest.raises(RuntimeError, match="call resume"):
        engine.step()
    pretend(monkeypatch, dataclasses.replace(room, in_use=weights + 100))
    engine.resume()
    assert engine.generate(requests(1))[0].tokens


def test_bytes_that_are_reserved_are_left_to_the_trainer():
    model, limits = Hybrid(EXACT), dataclasses.replace(LIMITS, utilization=1.0)
    shapes = packed_shapes(model)
    memory = DeviceMemory("device", plan_engine(model, limits, None, shapes, {}).total + 5000)
    most = fill(model, limits, memory, shapes, {})
    page = plan_engine(model, most, memory, shapes, {})["kv cache"] // most.pages
    less = dataclasses.replace(limits, reserved_bytes=2 * page)
    fewer = fill(model, less, memory, shapes, {})
    assert most.pages - 3 <= fewer.pages < most.pages - 1
    plan = plan_engine(model, fewer, memory, shapes, {})
    assert plan["reserved"] == 2 * page and plan.reserve >= 0
    with pytest.raises(ValueError, match="reserved_bytes must be an integer of at least 0; got -1"):
        Limits(reserved_bytes=-1)


def test_released_weights_come_back_with_an_update(engine, params, expected):
    engine.update(params[0])
    engine.release(weights=True)
    with pytest.raises(RuntimeError, match="released; call update"):
        engine.resume()
    engine.update(params[1])
    engine.resume()
    assert [each.tokens for each in engine.generate(requests())] == expected[1]
