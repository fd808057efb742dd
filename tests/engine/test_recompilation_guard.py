"""The engine's executables: buckets, the cache filled to the device, and the seal after warm-up."""

import dataclasses
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxattn.engine import lifecycle
from jaxattn.engine.compilation import compiler as compiling_module
from jaxattn.engine.engine import Engine, EngineBusyError
from jaxattn.engine.execution import overlap_loop as loop_module
from jaxattn.engine.requests.request import Request
from jaxattn.engine.runtime.process_state import PROCESS_STATE
from jaxattn.engine.runtime.recompilation_guard import RecompilationGuard, SealError
from jaxattn.engine.startup import capacity_planner, engine_build
from jaxattn.engine.steps import engine_state as state_module
from jaxattn.engine.steps.step_catalog import all_steps, entry_points
from jaxattn.limits import Limits
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.models.embedded.hybrid_model import Hybrid
from jaxattn.plan import PlanError, nbytes, plan
from jaxattn.plan.plan_display import print_plan
from tests.helpers.engine_cases import (
    BUCKETS,
    LIMITS,
    RECURRENT,
    SMALLEST,
    TRIAL,
    TWO,
    WHOLE,
    kept_steps,
    params_of,
    pretend,
    prompts,
    resized_params,
    with_steps,
)


@pytest.fixture(scope="module")
def params():
    return params_of(SMALLEST)


@pytest.fixture(scope="module", autouse=True)
def bounds_once():
    """Bounds of equal steps are traced once. No step depends on the share of the device."""
    traced, found = engine_build.bound_of, {}

    def bound(model, step, limits, params, implementation):
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(params))
        same = dataclasses.replace(limits, utilization=None)
        key = model, step, same, shapes, implementation
        if key not in found:
            found[key] = traced(model, step, limits, params, implementation)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_build, "bound_of", bound)
        yield


@pytest.fixture(scope="module")
def plain(params):
    kept_steps(LIMITS)
    return Engine(Hybrid(SMALLEST), params, LIMITS)


@pytest.fixture(scope="module")
def whole(params):
    """Every row at full length; those that fill a device find its steps and those of one row."""
    kept_steps(WHOLE, TRIAL)
    return Engine(Hybrid(SMALLEST), params, WHOLE)


@pytest.fixture
def alone(monkeypatch):
    """The engines of other tests are not beside the ones of this."""
    monkeypatch.setattr(PROCESS_STATE, "_engines", weakref.WeakSet())


@pytest.fixture(scope="module")
def bucketed():
    """Of a model with states; the other engines here have attention only."""
    kept_steps(BUCKETS, config=RECURRENT)
    return Engine(Hybrid(RECURRENT), params_of(RECURRENT), BUCKETS, strict=True)


LEVELS = ("greedy", "draws", "controls", "logprobs")


def tokens(engine, requests):
    return [done.tokens for done in engine.generate(requests)]


def stray():
    """What no warm-up ran: a new function, so that it cannot be compiled yet."""
    return jax.jit(lambda x: x + 1)


# Buckets ------------------------------------------------------------------------------------------


def test_every_entry_point_is_an_executable(bucketed):
    assert list(bucketed.executables) == [
        "prefill of 16 tokens beside 4 rows",
        "prefill of 32 tokens beside 4 rows",
        "decode of 1 x 3 tokens",
        "decode of 4 x 3 tokens",
        "decode of 1 x 1 tokens",
        "decode of 4 x 1 tokens",
        *[f"round of {n} rows: {level}" for n in (1, 4) for level in ("greedy", "draws")],
        *[f"sample of {n} rows: {level}" for n in (1, 4) for level in LEVELS],
        "mask of 1 rows",
        "mask of 4 rows",
        "gather of 16 tokens",
        "gather of 32 tokens",
        "pooling of 16 tokens",
        "pooling of 32 tokens",
        "score of 32 tokens",
        "filtered score of 32 tokens",
        "history of 16 tokens",
        "history of 32 tokens",
        "update of rows",
    ]
    for entry in entry_points(bucketed.limits):
        assert str(entry) in bucketed.executables
        arena = bucketed.state.arena
        for spec in state_module.op_specs(Hybrid(RECURRENT), BUCKETS, BUCKETS.table_width):
            arena.check(spec)


def noted(engine, monkeypatch):
    """The names of the model's steps, as they are sent from now on."""
    used = []

    def noting(name, step):
        def call(*args):
            used.append(name)
            return step(*args)

        return call

    names = [name for name in engine.executables if name.startswith(("prefill", "round"))]
    wrapped = {name: noting(name, engine.executables[name]) for name in names}
    monkeypatch.setattr(engine._runner, "executables", {**engine.executables, **wrapped})
    return used


def test_a_step_takes_the_smallest_bucket_that_holds_its_rows(bucketed, monkeypatch):
    bucketed.start()
    used = noted(bucketed, monkeypatch)
    bucketed.generate([Request(b"x" * 19, max_tokens=3)])
    assert used == [
        *["prefill of 16 tokens beside 4 rows"] * 2,
        *["round of 1 rows: greedy"] * 2,
    ]
    used.clear()
    bucketed.generate([Request(b"x", max_tokens=4) for _ in range(3)])
    assert used[0] == "prefill of 32 tokens beside 4 rows"
    assert used.count("round of 4 rows: greedy") >= 1


def test_buckets_write_the_same_text_and_nothing_is_compiled(bucketed):
    requests = prompts(6, length=17)
    alone = [tokens(bucketed, [request])[0] for request in requests]  # in the bucket of one row
    assert tokens(bucketed, requests) == alone
    assert not bucketed.seal.counts


@pytest.mark.usefixtures("untraced_bounds")
def test_the_plan_has_states_and_scratch_of_both_kinds_of_layers(bucketed):
    made, found = plan(Hybrid(RECURRENT), "2GiB", BUCKETS), bucketed.plan
    for name in ("weights", "rows", "arena", "kv cache", "conv state", "ssm state"):
        assert made[name] == found[name]
    for name in ("kv cache", "conv state", "ssm state"):
        assert found[name] == bucketed.state.array(name.replace(" ", "_")).nbytes
    (arena,) = [item for item in found.items if item.name == "arena"]
    assert [part.name for part in arena.parts] == [
        "gated_delta_rule_decode out",
        "mla_decode out",
        "mla_decode partial_out",
    ]
    wanted = {"mla_decode": "xla", "gated_delta_rule_decode": "xla"}
    assert bucketed.implementations == wanted


def test_the_plan_has_the_largest_executable_and_the_code_of_all(bucketed):
    memory = [step.memory_analysis() for step in bucketed.executables.values()]
    plan = bucketed.plan
    assert plan["xla temp"] == max(stats.temp_size_in_bytes for stats in memory)
    assert plan["xla code"] == sum(stats.generated_code_size_in_bytes for stats in memory)
    assert plan["arena"] == bucketed.state.arena.nbytes


# The cache is filled ------------------------------------------------------------------------------


def device(total, **fields):
    return DeviceMemory("a device", total, **fields)


FULL = dataclasses.replace(WHOLE, num_pages=None, utilization=0.9)


def allocations(monkeypatch):
    """The limits of each state that is allocated from here on."""
    made, real = [], lifecycle.allocate_state
    monkeypatch.setattr(
        lifecycle, "allocate_state", lambda *a: made.append(a[0].limits) or real(*a)
    )
    return made


@pytest.mark.slow(
    reason="pages that the plan does not count; found by a cache below one row, by memory outside "
    "of JAX there, and by engine/test_memory too"
)
def test_the_cache_gets_what_the_plan_leaves(params, whole, alone, monkeypatch):
    page = whole.plan["kv cache"] // WHOLE.pages
    total = int((whole.plan.inside - 3 * page) / 0.9)
    made = allocations(monkeypatch)
    pretend(monkeypatch, device(total))
    compiled = []
    engine = Engine(
        Hybrid(SMALLEST), params, FULL, strict=True,
        on_compile=lambda name, seconds: compiled.append(name) if seconds else None,
    )  # fmt: skip
    # What is tried beside one row was compiled for `whole`, and of that those stay that do not
    # depend on the pages.
    assert sorted(compiled) == sorted(
        name for name in engine.executables if name.startswith(("prefill", "decode", "round"))
    )
    assert engine.limits.pages in (6, 5)
    assert 0 <= engine.plan.reserve < 2 * page
    assert not made  # nothing is allocated before the engine starts
    engine.start()
    assert [limits.pages for limits in made] == [engine.limits.pages]
    assert {limits.table_width for limits in made} == {3}

    assert engine.plan["kv cache"] == engine.limits.pages * page
    assert engine.plan["kv cache"] == engine.state.array("kv_cache").nbytes
    requests = prompts(5)
    assert tokens(engine, requests) == tokens(whole, requests)
    assert engine.scheduler.pages.size == engine.limits.pages
    # All of them can be owned by rows at once.
    long = [Request(b"y", max_tokens=64 * (engine.limits.pages // 3), id=i) for i in range(3)]
    assert {done.finish_reason for done in engine.generate(long)} == {"length"}
    assert not engine.seal.counts


def test_no_more_pages_are_taken_than_rows_can_use(params, whole, monkeypatch):
    pretend(monkeypatch, device(10**12))
    engine = Engine(Hybrid(SMALLEST), params, dataclasses.replace(FULL, utilization=0.5))
    assert engine.limits.pages == engine.limits.wanted_pages == 9
    assert engine.plan.reserve > 10**11


def test_memory_outside_of_jax_is_not_given_to_the_cache(params, whole, alone, monkeypatch):
    """A library takes 1 MB from the driver while weights are loaded, where no allocator sees it."""
    limits = dataclasses.replace(FULL, utilization=1.0)
    page = whole.plan["kv cache"] // WHOLE.pages
    total = whole.plan.inside + 10**6
    quiet, taken = device(total, free=total), device(total, free=total - 10**6 - 5 * page)
    pretend(monkeypatch, quiet)
    assert Engine(Hybrid(SMALLEST), params, limits).limits.pages == 9
    gc.collect()  # the engine before, whose temp would count
    # The device is looked at for the first plan, and when the weights are there.
    pretend(monkeypatch, quiet, taken)
    engine = Engine(Hybrid(SMALLEST), params, limits)
    assert engine.limits.pages == 9
    engine.start()
    assert engine.plan["driver"] == 10**6 + 5 * page
    assert engine.limits.pages in (3, 4)
    assert engine.plan.reserve >= 0


def test_a_partly_filled_device_is_planned_by_what_is_free(params, whole, alone, monkeypatch):
    """Another process holds 30% of it: 0.9 of the total is not there to be taken."""
    page = whole.plan["kv cache"] // WHOLE.pages
    free = whole.plan.inside - 6 * page + page // 2
    total = free * 10 // 7
    assert whole.plan.inside < 0.9 * total  # all nine pages fit an empty device
    pretend(monkeypatch, device(total, free=free))
    engine = Engine(Hybrid(SMALLEST), params, FULL)
    assert engine.limits.pages == 3
    assert engine.plan["driver"] == total - free
    assert free - page < engine.plan.inside <= free
    console = Console(width=200)
    with console.capture() as printed:
        print_plan(console, engine.plan)
    assert f"{total:,} less {total - free:,} outside of JAX's allocator" in printed.get()
    assert "the device memory that other processes hold" in printed.get()


def test_a_device_without_room_for_a_page_is_refused_with_the_plan(params, monkeypatch):
    pretend(monkeypatch, device(60_000))  # before anything is compiled
    with pytest.raises(PlanError, match="the item that does not fit is the") as caught:
        Engine(Hybrid(SMALLEST), params, Limits(batch=3, max_model_len=256, utilization=1.0))
    assert caught.value.plan is not None and caught.value.advice


def test_a_cache_below_one_row_is_refused_before_it_is_allocated(
    params, plain, whole, alone, monkeypatch
):
    """As `plan` refuses it: known without XLA's temp, or only with what the compiled steps take."""
    page, temp = whole.plan["kv cache"] // WHOLE.pages, whole.plan["xla temp"]
    beside = whole.plan.inside - whole.plan["kv cache"]
    limits = dataclasses.replace(FULL, utilization=1.0)
    allocated, compiled = allocations(monkeypatch), []

    def come_up(total, **options):
        allocated.clear(), compiled.clear()
        pretend(monkeypatch, device(total))
        on_compile = lambda name, seconds: compiled.append(name)  # noqa: E731
        asked = dataclasses.replace(limits, **options)
        engine = Engine(Hybrid(SMALLEST), params, asked, on_compile=on_compile)
        engine.start()
        return engine

    monkeypatch.setattr(capacity_planner, "advice", lambda *args, **beside: ("something smaller",))
    for total, compiles in ((beside - temp + 2 * page, False), (beside + 5 * page // 2, True)):
        with pytest.raises(
            PlanError, match=r"[12] pages are left, but one row of 192 .* needs 3"
        ) as caught:
            come_up(total)
        assert caught.value.plan["kv cache"] < 3 * page and caught.value.advice
        assert not allocated and bool(compiled) == compiles
    # Fewer may be asked for by number: short rows alone are served then.
    few = come_up(beside + 7 * page // 2, max_model_len=256, num_pages=3)
    assert few.limits.pages == 3 < few.limits.pages_per_row
    assert [limits.pages for limits in allocated] == [3]


# The seal -----------------------------------------------------------------------------------------


def test_what_is_traced_or_compiled_inside_is_counted():
    seal = RecompilationGuard()
    with seal.watch():
        stray()(jnp.ones(3))
    assert seal.counts["trace"] and seal.counts["compilation"]
    assert any("<lambda>" in what for what in seal.messages)
    before = dict(seal.counts)
    stray()(jnp.ones(3))  # outside
    assert seal.counts == before


def test_strict_refuses_before_it_is_traced():
    seal, function, traced = RecompilationGuard(strict=True), stray(), []

    @jax.jit
    def probe(x):
        traced.append(1)
        return function(x)

    x = jnp.ones(3)
    with seal.watch(), pytest.raises(SealError, match="trace after the engine was sealed: probe"):
        probe(x)
    assert not traced
    assert probe(x)[0] == 2  # and it is not broken by that


def test_other_threads_and_other_seals_are_let_alone():
    seal, other = RecompilationGuard(strict=True), RecompilationGuard()
    x = np.ones(3, np.float32)
    with seal.watch():
        thread = threading.Thread(target=lambda: stray()(x))
        thread.start()
        thread.join()
        with other.watch():
            stray()(x)
    assert not seal.counts and other.counts["compilation"] == 1


def test_a_moved_buffer_is_noticed():
    seal = RecompilationGuard()
    tree = {"a": jnp.ones(1000), "b": jnp.zeros(0)}
    seal.hold(tree)
    seal.check(tree)
    assert not seal.counts
    tree = {**tree, "a": tree["a"] + 1}
    seal.check(tree)
    assert seal.messages == ["buffer: new buffer of ['a']"]
    seal.check(tree)
    assert seal.counts["buffer"] == 1


@pytest.mark.parametrize("make", ["run", "copy"])
def test_a_buffer_that_a_step_leaves_behind_is_refused_or_counted(make):
    """Of what is compiled already, or of the host's; refused before it is there."""
    double, x, host = jax.jit(lambda x: x * 2), jnp.ones(3), np.ones(3, np.float32)
    double(x)
    some = {"run": lambda: double(x), "copy": lambda: jax.device_put(host)}[make]
    seal, kept = RecompilationGuard(strict=True), []
    with pytest.raises(SealError, match="after the engine was sealed"), seal.watch():
        kept.append(some())
    assert not kept and seal.counts.total() == 1
    with seal.watch(), seal.allowed():
        some()
    kept.append(some())  # outside
    assert seal.counts.total() == 1

    seal = RecompilationGuard()
    with seal.watch():
        some()  # comes and goes
    assert not seal.counts
    seal = RecompilationGuard()
    with seal.watch():
        kept.append(some())
    assert seal.messages == ["buffer: 1 more live array(s) than before the step"]


def test_an_engine_notices_a_buffer_that_its_step_keeps(params, plain, monkeypatch):
    double, x, kept = jax.jit(lambda x: x * 2), jnp.ones(3), []
    double(x)
    pack = loop_module.PromptLayout.pack
    for strict in (True, False):
        engine = Engine(Hybrid(SMALLEST), params, LIMITS, strict=strict)
        engine.start(), kept.clear()
        monkeypatch.setattr(
            loop_module.PromptLayout, "pack", lambda *a: kept.append(double(x)) or pack(*a)
        )
        if strict:
            with pytest.raises(SealError, match="after the engine was sealed"):
                engine.generate(prompts(1))
            assert not kept
        else:
            engine.generate(prompts(1))
            assert engine.seal.messages == ["buffer: 1 more live array(s) than before the step"]


def test_one_step_in_many_counts_arrays_and_all_others_cost_no_scan(params, plain, monkeypatch):
    engine, scans = Engine(Hybrid(SMALLEST), params, LIMITS), []
    engine.start()
    live_arrays = jax.live_arrays
    monkeypatch.setattr(jax, "live_arrays", lambda *a: scans.append(1) or live_arrays(*a))
    engine.generate(prompts(3, max_tokens=50))
    assert engine.stats.decode_steps > 50 and len(scans) == 2  # before and after the first


def test_a_hundred_mixed_steps_compile_nothing_and_keep_every_buffer(bucketed):
    bucketed.start()
    gc.collect()
    live = len(jax.live_arrays())
    bucketed.generate(prompts(9, length=30, max_tokens=12))
    assert bucketed.stats.decode_steps + bucketed.stats.prefill_steps > 50
    assert not bucketed.seal.counts
    gc.collect()
    assert len(jax.live_arrays()) == live


def test_a_step_that_compiles_stops_a_strict_engine_and_is_counted_by_another(params, plain):
    for strict in (True, False):
        engine = Engine(Hybrid(SMALLEST), params, LIMITS, strict=strict)
        engine.start()
        name = "round of 3 rows: greedy"
        real = engine.executables[name]

        def compiles(*args, real=real):
            stray()(np.ones(3, np.float32))
            return real(*args)

        with_steps(engine, {**engine.executables, name: compiles})
        if strict:
            with pytest.raises(SealError, match="trace after the engine was sealed"):
                engine.generate(prompts(1))
            assert engine.scheduler.pages.in_use == 0
        else:
            engine.generate(prompts(1))
            assert engine.seal.counts["compilation"] == engine.stats.decode_steps


def test_a_callback_may_compile(bucketed):
    bucketed.generate(prompts(1), on_token=lambda request, token: stray()(np.ones(3, np.float32)))
    assert not bucketed.seal.counts


# Exactly once -------------------------------------------------------------------------------------


def test_layers_threads_and_engines_compile_once(monkeypatch):
    """Two steps at a time, which are told of by name and come in their order."""
    compiled, events, lock = [], [], threading.Lock()
    real = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self, *a, **k: compiled.append(1) or real(self)
    )
    config = dataclasses.replace(SMALLEST, num_repeats=2)
    # As in test_executable_cache, whose steps that know no layer are equal, but without rounds.
    limits = dataclasses.replace(TWO, reproducible=True)
    barrier, engines, errors = threading.Barrier(8), [], []

    def on_compile(name, seconds):
        with lock:
            events.append((name, seconds))

    def build():
        try:
            barrier.wait()
            engine = Engine(
                Hybrid(config), deep, limits, workers=2, on_compile=on_compile, strict=True
            )
            engine.start()
            engines.append(engine)
        except Exception as error:
            errors.append(error)

    deep = resized_params(config)
    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(engines) == 8
    steps = [str(step) for step in all_steps(limits)]
    # Beside the steps, what allocates the state, and what an update of the weights needs.
    assert len(compiled) == len(steps) + 1 + len(engines[0]._weights.programs)
    assert all(list(engine.executables) == steps for engine in engines)
    assert sorted(name for name, seconds in events if seconds) == sorted(steps)
    assert sorted(name for name, seconds in events if seconds is None) == sorted(8 * steps)
    assert tokens(engines[0], prompts(4)) == tokens(engines[1], prompts(4))
    pointers = {engine.state.array("kv_cache").unsafe_buffer_pointer() for engine in engines}
    assert len(pointers) == 8
    # What a step tells has the shape of block tables of two pages: no donated buffer goes to it.
    assert engines[0].limits.table_width == 2 and not engines[0].seal.counts


def test_executables_are_forgotten_with_their_last_engine(params, plain, monkeypatch):
    limits = dataclasses.replace(LIMITS, prefill_chunk=9)
    compiled = plain.executables  # what is compiled does not matter here

    def fake(steps, *rest):
        of_kind = {name.split()[0]: step for name, step in compiled.items()}
        return {str(step): of_kind[str(step).split()[0]] for step in steps}

    monkeypatch.setattr(compiling_module, "_compile", fake)
    gc.collect()  # of engines before
    before = len(PROCESS_STATE.steps)
    first, second = (Engine(Hybrid(SMALLEST), params, limits) for _ in range(2))
    assert first.executables == second.executables
    assert len(PROCESS_STATE.steps) == before + 1
    del first
    gc.collect()
    assert len(PROCESS_STATE.steps) == before + 1
    del second
    gc.collect()
    assert len(PROCESS_STATE.steps) == before


# Isolation ----------------------------------------------------------------------------------------


def test_one_engine_in_two_threads_serves_one_and_refuses_the_other(plain):
    engine = plain
    wanted = tokens(engine, prompts(3))
    inside, go_on, found = threading.Event(), threading.Event(), []

    def hold(request, token):
        inside.set()
        assert go_on.wait(60)

    def first():
        found.append([done.tokens for done in engine.generate(prompts(3), on_token=hold)])

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    with pytest.raises(EngineBusyError, match="give each thread its own engine"):
        engine.generate(prompts(1))
    go_on.set()
    thread.join()
    assert found == [wanted] == [tokens(engine, prompts(3))]


@pytest.mark.slow(reason="a step of another model; found by engines of several threads there too")
def test_engines_of_two_configurations_interleave_without_a_trace(params, plain):
    other_config = dataclasses.replace(
        SMALLEST, num_attention_heads=4, kv_lora_rank=32, linear_num_value_heads=4, dtype="float32"
    )
    engines = [
        Engine(Hybrid(SMALLEST), params, LIMITS, strict=True),
        Engine(Hybrid(other_config), params_of(other_config, 1), LIMITS, strict=True),
    ]
    alone = [[tokens(engine, [request])[0] for request in prompts(4)] for engine in engines]
    assert alone[0] != alone[1]
    together = [[], []]

    def serve(place):
        for request in prompts(4):
            together[place] += tokens(engines[place], [request])

    threads = [threading.Thread(target=serve, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_freeing_one_engine_frees_its_bytes_and_not_the_others(plain, bucketed):
    keep, drop = plain, Engine(Hybrid(RECURRENT), params_of(RECURRENT), BUCKETS)
    wanted = tokens(keep, prompts(2))
    drop.start()
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    held = sum(drop.plan[part] for part in ("arena", "kv cache", "conv state", "ssm state"))
    del drop
    gc.collect()
    after = sum(array.nbytes for array in jax.live_arrays())
    assert before - after >= held > 0
    assert tokens(keep, prompts(2)) == wanted


def test_a_second_engine_leaves_alone_what_the_first_holds(params, whole, alone, monkeypatch):
    """In JAX's pool are the first engine's weights and state; the second plans beside them."""
    first = whole
    PROCESS_STATE.opened(first)
    held = first.plan.inside - first.plan["xla temp"]
    total = 10**9
    seen = device(total, free=total // 2, pool=total // 2, in_use=held, limit=total)
    pretend(monkeypatch, seen)
    second = Engine(Hybrid(SMALLEST), params, dataclasses.replace(FULL, utilization=None))
    # What it holds but for the weights, which are the second's too, and what a step of it takes.
    assert second.plan["others"] == held - nbytes(params) + first.plan["xla temp"]
    assert second.plan.reserve == total - second.plan.inside
