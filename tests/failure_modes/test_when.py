"""Scratch and executables that come at the wrong time: on first use, for other shapes than serving.

Each test is named for what must not happen; "naive" is the design that it happened to.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.request import Request
from jaxattn.engine.runtime.recompilation_guard import RecompilationGuard, SealError
from jaxattn.engine.steps.engine_state import new_state
from jaxattn.engine.steps.model_steps import ModelStep
from jaxattn.engine.steps.step_catalog import all_steps, entry_points
from jaxattn.models.embedded.hybrid_model import Hybrid
from jaxattn.models.interface import DecodeBatch
from tests.helpers.engine_cases import (
    BUCKETS,
    LIMITS,
    RECURRENT,
    kept_steps,
    params_of,
    places_of,
    prompts,
    run_step,
    with_steps,
)
from tests.helpers.model_cases import changed


@pytest.fixture(scope="module")
def params():
    return params_of(RECURRENT)


def engine_of(params, **options):
    kept_steps(BUCKETS, config=RECURRENT)
    return Engine(Hybrid(RECURRENT), params, BUCKETS, **options)


# 3 ------------------------------------------------------------------------------------------------


def test_nothing_is_compiled_or_allocated_on_first_use(params):
    engine = engine_of(params, strict=True)
    engine.start()
    (done,) = engine.generate([Request([1], max_tokens=2)])  # the first decode of all
    assert len(done.tokens) == 2
    engine.generate([Request([1] * 57, max_tokens=3)])  # continued chunks and the last partial one
    engine.generate(prompts(7, length=20))
    with engine.seal.watch():  # several tokens a row: a draft's
        for step in all_steps(engine.limits):
            with engine.seal.allowed():
                given = step.padding(engine.model, engine.limits)
                _, engine._runner.state = run_step(engine, step, given, engine.state)
            engine._runner.check()
    assert not engine.seal.counts

    naive = jax.jit(lambda x: x * 2)
    with engine.seal.watch(), pytest.raises(SealError, match="trace after the engine was sealed"):
        naive(np.ones(3, np.float32))


def test_an_entry_point_of_several_tokens_is_not_only_compiled(params):
    """`Engine.generate` never calls it: its callers get what the one-token steps compute."""
    engine = engine_of(params, strict=True)
    several, one = ModelStep("decode", 4, 3), ModelStep("decode", 4, 1)
    tokens = np.asarray([[5, 90, 17], [0, 0, 0], [200, 3, 44], [0, 0, 0]], np.int32)
    real = np.asarray([1, 0, 1, 0], np.int32)

    pages = np.arange(real.size * engine.limits.table_width, dtype=np.int32)
    tables, slots = pages.reshape(real.size, -1), np.asarray([0, -1, 3, -1], np.int32)

    def run(entry, state, batch):
        """Two real rows, the second in the last slot."""
        return engine.executables[str(entry)](engine._runner.weights, state, batch)

    engine.start()
    first, second = (new_state(Hybrid(RECURRENT), engine.limits) for _ in range(2))
    with engine.seal.watch(), engine.seal.allowed():
        found, first = run(several, first, DecodeBatch(tokens, 3 * real, tables, slots))
        for step in range(3):
            batch = places_of(engine.limits, tokens[:, step], (step + 1) * real, tables, slots)
            wanted, second = run(one, second, batch)
    assert not engine.seal.counts
    np.testing.assert_array_equal(np.argmax(found, -1), np.argmax(wanted, -1))
    for name in ("kv_cache", "conv_state", "ssm_state"):
        several, one = (np.asarray(x.array(name), np.float32) for x in (first, second))
        assert np.any(several) and np.abs(several - one).max() <= 0.01 * np.abs(one).max(), name


def refuses_what_is_lazy(engine, name):
    """The naive step compiles something when it first runs."""
    eager = engine.executables[name]

    def lazy(*args):
        jax.jit(lambda x: x + 1)(np.ones(3, np.float32))
        return eager(*args)

    with_steps(engine, {**engine.executables, name: lazy})
    with pytest.raises(SealError, match="trace after the engine was sealed"):
        engine.generate(prompts(1))


def test_a_lazily_compiled_step_does_not_pass_unnoticed(params):
    engine = engine_of(params, strict=True)
    engine.start()
    refuses_what_is_lazy(engine, "round of 1 rows: greedy")


def test_a_new_buffer_does_not_pass_unnoticed(params):
    engine = engine_of(params, strict=True)
    engine.start()
    name = "round of 1 rows: greedy"
    eager = engine.executables[name]

    def moves(*args):
        (state, rows), tokens = eager(*args)
        kept.append(state.array("ssm_state"))
        # Waited for: a copy under way beside a step that is given the copied array has once hung.
        copy = jnp.array(state.array("ssm_state")).block_until_ready()
        return (changed(state, ssm_state=copy), rows), tokens

    kept = []
    jnp.array(engine.state.array("ssm_state"))  # the copy itself is compiled already
    with_steps(engine, {**engine.executables, name: moves})
    with pytest.raises(SealError, match=r"new buffer of .*ssm_state"):
        engine.generate(prompts(1))


# 4 ------------------------------------------------------------------------------------------------


def test_the_warm_up_does_not_run_other_shapes_and_dtypes_than_serving(params):
    engine = engine_of(params)
    seen, kept = {}, ("weak_type", "sharding", "committed")

    def noting(name, step, when):
        def call(*given):
            leaves, tree = jax.tree.flatten(given)
            avals = tuple(
                (x.shape, str(x.dtype), *(getattr(x, name, None) for name in kept)) for x in leaves
            )
            seen.setdefault(name, {}).setdefault(when, set()).add((tree, avals))
            return step(*given)

        return call

    plain = engine.executables
    for when in ("warm-up", "serving"):
        wrapped = {name: noting(name, step, when) for name, step in plain.items()}
        with_steps(engine, wrapped)
        if when == "warm-up":
            engine.start()
        else:
            engine.generate(prompts(7, length=20))
    served = [name for name, calls in seen.items() if "serving" in calls]
    assert {"update of rows", "sample of 4 rows: greedy"} < set(served)
    assert len([name for name in served if name.startswith(("prefill", "round"))]) == 4
    for name in served:
        # Places are on the device where rows decode, and the host's where a prompt ends.
        assert seen[name]["serving"] <= seen[name]["warm-up"] or "sample" in name, name

    compiled = []
    naive = jax.jit(lambda g: compiled.append(1) or g * 2)
    naive(jnp.zeros(4, jnp.bfloat16))  # the gate of the warm-up
    naive(jnp.zeros(4, jnp.float32))  # the gate of serving
    assert len(compiled) == 2

    zeros, seal = jnp.zeros(4), RecompilationGuard()
    naive = jax.jit(lambda state: state * 3)
    naive(zeros)  # a state that JAX has put on its default device
    with seal.watch():
        naive(jax.device_put(zeros, jax.devices()[0]))  # one that a restart has put there by name
    assert seal.counts["compilation"] == 1 and not seal.counts["trace"]


def test_the_warm_up_does_not_leave_anything_behind(params):
    """It runs on dummy rows; what they write is another row's first page, or slot 0."""
    engine = engine_of(params)
    engine.start()
    state = engine.state
    fresh = new_state(Hybrid(RECURRENT), engine.limits)
    for name in ("kv_cache", "conv_state", "ssm_state"):
        assert np.asarray(state.array(name)).tobytes() == bytes(fresh.array(name).nbytes)
    assert not any(np.asarray(counter).any() for counter in state.arena.persistent.values())

    requests = prompts(3)
    warm = [done.tokens for done in engine.generate(requests)]
    cold = engine_of(params)
    cold.start()
    cold._runner.state = fresh  # never warmed
    cold.seal.hold((fresh, cold._runner.rows))
    assert warm == [done.tokens for done in cold.generate(requests)]

    entry, zeros = entry_points(engine.limits)[-1], np.zeros(BUCKETS.batch, np.int32)
    tables = np.zeros((BUCKETS.batch, BUCKETS.table_width), np.int32)
    naive = places_of(BUCKETS, zeros, zeros + 1, tables, zeros)  # a token in page 0, slot 0
    _, state = engine.executables[str(entry)](
        engine._runner.weights, new_state(Hybrid(RECURRENT), BUCKETS), naive
    )
    assert (
        np.asarray(state.array("kv_cache"))[:, 0].any()
        and np.asarray(state.array("ssm_state"))[:, 0].any()
    )


def test_no_executable_is_missing_that_serving_reaches(params):
    engine = engine_of(params)
    engine.start()
    used, find = set(), engine._runner._step
    engine._runner._step = lambda step: used.add(str(step)) or find(step)
    requests = [Request([1] * n, max_tokens=4) for n in (1, 4, 5, 16, 17, 33)]
    engine.generate(requests)
    options = ({"temperature": 1.0}, {"top_p": 0.5, "temperature": 1.0}, {"logprobs": 3})
    engine.generate([dataclasses.replace(requests[3], **each) for each in options])
    penalized = [Request([1] * n, repetition_penalty=1.1, max_tokens=4) for n in (3, 9)]
    engine.generate(penalized)  # whose histories come from one step
    engine.generate(penalized[:1])
    engine.score([each.prompt for each in penalized])
    engine.score([penalized[0].prompt])
    for asked in (penalized, penalized[:1]):
        engine.score([each.prompt for each in asked], top=1)
    engine.embed([each.prompt for each in penalized])
    engine.embed([penalized[0].prompt])
    assert used <= set(engine.executables)
    unused = set(engine.executables) - used
    assert {name.split()[0] for name in unused} <= {"decode", "round", "sample", "mask"}
    assert {name for name in unused if "decode" in name} == {
        "decode of 1 x 3 tokens",
        "decode of 4 x 3 tokens",
    }


# 24 -----------------------------------------------------------------------------------------------


def test_eager_mode_does_not_run_unsealed(params):
    engine = engine_of(params, strict=True)
    wanted = [done.tokens for done in engine.generate(prompts(2))]
    with jax.disable_jit(), pytest.raises(ValueError, match="Disable jit is not supported"):
        engine.generate(prompts(2))
    assert [done.tokens for done in engine.generate(prompts(2))] == wanted
    assert not engine.seal.counts


@pytest.mark.slow_cases(
    reason='a step outside of the seal where "xla" is named; found by the best implementation, '
    "which is XLA's there, too"
)
@pytest.mark.parametrize("implementation", [None, pytest.param("xla", marks=pytest.mark.slow)])
def test_no_implementation_escapes_the_seal(params, implementation):
    kept_steps(BUCKETS, config=RECURRENT)  # the best's; what is named has executables of its own
    limits = BUCKETS if implementation is None else LIMITS
    engine = Engine(Hybrid(RECURRENT), params, limits, implementation=implementation, strict=True)
    engine.start()
    assert engine.seal._addresses
    engine.generate(prompts(2))
    assert not engine.seal.counts
    refuses_what_is_lazy(engine, f"round of {limits.batches[0]} rows: greedy")


def test_a_seal_is_not_only_for_the_thread_that_made_it(params):
    import threading

    seal, found = RecompilationGuard(strict=True), []

    def serve():
        try:
            with seal.watch():
                jax.jit(lambda x: x - 2)(np.ones(3, np.float32))
        except SealError as error:
            found.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert len(found) == 1
