"""Scratch that someone else has too: another model, thread, lane, row, or the op before.

Each test is named for what must not happen; "naive" is the design that it happened to.
"""

import ast
import dataclasses
import functools
import gc
import importlib
import importlib.util
import itertools
import pkgutil
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn
from jaxattn import gdn, mla
from jaxattn.aliasing.checker import AliasingError, check_aliasing
from jaxattn.arena import Arena, ArenaError, ArenaSpec
from jaxattn.engine.engine import Engine, EngineBusyError
from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.engine.steps.engine_state import new_state
from jaxattn.engine.steps.step_catalog import entry_points
from jaxattn.models.embedded.hybrid_model import Hybrid
from tests.helpers.engine_cases import (
    BUCKETS,
    LIMITS,
    RECURRENT,
    SMALLEST,
    kept_steps,
    params_of,
    places_of,
    prompts,
)
from tests.helpers.model_cases import changed

pytestmark = pytest.mark.lazy_steps

SCALE = 0.1
MAX_PAGES = 2


@pytest.fixture(scope="module")
def params():
    kept_steps(LIMITS)
    return params_of(SMALLEST)


def attention(rows=3, q_len=1, heads=2, rank=16, dtype=jnp.bfloat16, seed=0):
    """Arguments of `mla_decode` whose rows have 5, 0, 70, ... tokens of pages of 64."""
    rng = np.random.default_rng(seed)
    lens = jnp.asarray([5, 0, 70, 64][:rows], jnp.int32)
    tables = jnp.arange(rows * MAX_PAGES, dtype=jnp.int32).reshape(rows, MAX_PAGES)
    q = rng.standard_normal((rows, q_len, heads, rank + 8), np.float32)
    cache = rng.standard_normal((rows * MAX_PAGES, 64, rank + 8), np.float32)
    return jnp.asarray(q, dtype), jnp.asarray(cache, dtype), tables, lens


def decode(q, *rest, **options):
    rank = q.shape[-1] - 8
    return mla.mla_decode(q, *rest, scale=SCALE, kv_lora_rank=rank, **options)


def spec_for(q):
    rows, q_len, heads, dim = q.shape
    return mla.scratch(
        batch=rows,
        q_len=q_len,
        num_heads=heads,
        max_pages=MAX_PAGES,
        kv_lora_rank=dim - 8,
        dtype=q.dtype,
    )


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if leaf.size]


# 6 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted",
    [dict(heads=128), dict(rank=256), dict(rows=4), dict(q_len=128), dict(dtype=jnp.float16)],
    ids=["heads", "rank", "rows", "tokens", "dtype"],
)
def test_scratch_is_not_reused_for_another_shape_or_dtype(wanted):
    """The naive check compared the batch and the dtype, and no heads or rank."""
    some = dict(rank=128)  # more than what sizes are rounded up to
    arena = Arena.allocate(spec_for(attention(**some)[0]))
    other = attention(**some | wanted)
    with pytest.raises(ArenaError, match="mla_decode: region 'out' .* does not fit"):
        jax.eval_shape(lambda *args: decode(*args, arena=arena), *other)


def test_models_of_several_shapes_in_one_arena_do_not_read_each_others_rows():
    models = [
        attention(heads=heads, rank=rank, dtype=dtype, seed=seed)
        for seed, (heads, rank, dtype) in enumerate(
            [(2, 16, jnp.bfloat16), (128, 16, jnp.bfloat16), (16, 32, jnp.float32)]
        )
    ]
    alone = [decode(*model) for model in models]
    spec = spec_for(models[0][0]) | spec_for(models[1][0]) | spec_for(models[2][0])
    arena = Arena.allocate(spec).poison()
    for place in (0, 1, 2, 1, 0, 2):
        out, lse, arena = decode(*models[place], arena=arena)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(alone[place][0]))
        np.testing.assert_array_equal(np.asarray(lse), np.asarray(alone[place][1]))


# 7 ------------------------------------------------------------------------------------------------


# Of an extra, at the top of the module.
NEEDS = {
    "jaxattn.bench.baselines.triton_adapters.fla_delta_rule": ("triton", "fla"),
    "jaxattn.bench.baselines.triton_adapters.flaggems_mla": ("triton", "flag_gems"),
    "jaxattn.bench.baselines.triton_adapters.vllm_turboquant": ("triton", "vllm"),
    "jaxattn.integrations.tunix": ("tunix",),
}


def modules():
    for found in pkgutil.walk_packages(jaxattn.__path__, "jaxattn."):
        if None in map(importlib.util.find_spec, NEEDS.get(found.name, ())):
            continue
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def test_no_module_or_class_holds_an_array():
    def arrays(value):
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list | tuple | set):
            return any(map(arrays, value))
        return isinstance(value, jax.Array)

    def holders(namespace, where):
        for name, value in vars(namespace).items():
            if arrays(value):
                yield f"{where}.{name}"
            if isinstance(value, type) and value.__module__ == where:
                yield from holders(value, f"{where}.{name}")

    assert not [holder for module in modules() for holder in holders(module, module.__name__)]


def test_no_module_calls_jax_numpy_when_it_is_imported():
    """What a function builds later is an argument or a result; a constant would be shared."""
    makers = {"zeros", "ones", "full", "empty", "array", "asarray", "arange", "device_put"}
    for module in modules():
        tree = ast.parse(Path(module.__file__).read_text())
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                continue
            for call in ast.walk(statement):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                    owner = getattr(call.func.value, "id", "")
                    made = call.func.attr in makers and owner in ("jnp", "jax")
                    assert not made, (module.__name__, call.lineno)


def test_two_engines_do_not_share_a_buffer(params):
    kept_steps(BUCKETS, config=RECURRENT)
    engines = [Engine(Hybrid(SMALLEST), params, LIMITS, strict=True) for _ in range(2)]
    engines.append(Engine(Hybrid(RECURRENT), params_of(RECURRENT), BUCKETS, strict=True))
    held = [set(pointers(engine.state)) for engine in engines]
    assert not held[0] & held[1] and not held[0] & held[2] and not held[1] & held[2]
    requests = prompts(4)
    alone = [[engine.generate([r])[0].tokens for r in requests] for engine in engines]
    together = [[], [], []]
    for request in requests:
        for place, engine in enumerate(engines):
            together[place] += [engine.generate([request])[0].tokens]
    assert together == alone
    assert [set(pointers(engine.state)) for engine in engines] == held


def test_two_engines_do_not_mix_when_their_steps_alternate():
    """200 decode steps, one of each in turn: the bits are those of either alone."""
    kept_steps(BUCKETS, config=RECURRENT)
    engines = [Engine(Hybrid(RECURRENT), params_of(RECURRENT, seed), BUCKETS) for seed in range(2)]
    entry = entry_points(BUCKETS)[-1]

    def begin(place):
        """Rows of one token, each on a page of its own."""
        engines[place].start()
        return np.asarray([5, 90 + place, 200, 7], np.int32), []

    def step(place, number, state, tokens, found):
        limits, lengths = engines[place].limits, np.full(4, number % 64 + 1, np.int32)
        tables = np.arange(4, dtype=np.int32)[:, None].repeat(limits.table_width, axis=1)
        batch = places_of(limits, tokens, lengths, tables, np.asarray([2, 0, 3, 1], np.int32))
        run = engines[place].executables[str(entry)]
        logits, state = run(engines[place]._runner.weights, state, batch)
        tokens = np.argmax(logits, -1).astype(np.int32)
        return state, (tokens, [*found, tokens])

    def outcome(state, tokens, found):
        caches = (state.array("kv_cache"), state.array("conv_state"), state.array("ssm_state"))
        return [np.stack(found).tobytes(), *(np.asarray(cache).tobytes() for cache in caches)]

    alone = []
    for place in range(2):
        run, state = begin(place), new_state(Hybrid(RECURRENT), engines[place].limits)
        for number in range(100):
            state, run = step(place, number, state, *run)
        alone.append(outcome(state, *run))
    runs = [begin(place) for place in range(2)]
    for number in range(100):
        for place, engine in enumerate(engines):
            engine._runner.state, runs[place] = step(place, number, engine.state, *runs[place])
    pairs = zip(engines, runs, strict=True)
    assert [outcome(engine.state, *run) for engine, run in pairs] == alone
    assert alone[0][0] != alone[1][0]


def test_an_engine_that_is_gone_does_not_keep_its_bytes(params):
    engine = Engine(Hybrid(SMALLEST), params, LIMITS)
    engine.generate(prompts(1))
    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    held = sum(engine.plan[n] for n in ("arena", "kv cache"))
    del engine
    gc.collect()
    assert before - sum(x.nbytes for x in jax.live_arrays()) >= held


# 8 ------------------------------------------------------------------------------------------------


@functools.cache
def donating():
    """Compiled once: an arena is an argument, and its old handle is void."""
    return jax.jit(lambda arena, *args: decode(*args, arena=arena), donate_argnums=0)


def test_one_arena_is_not_used_twice():
    args, step = attention(), donating()
    arena = Arena.allocate(spec_for(args[0]))
    step(arena, *args)
    with pytest.raises((RuntimeError, ValueError), match="deleted|donated"):
        step(arena, *args)


def test_two_threads_do_not_both_write_to_one_arena():
    """Exactly one has it, with its own numbers, and the other is told."""
    models, step = [attention(seed=seed) for seed in range(2)], donating()
    wanted = [np.asarray(decode(*model)[0]) for model in models]
    step(Arena.allocate(spec_for(models[0][0])), *models[0])
    for _ in range(50):
        arena = Arena.allocate(spec_for(models[0][0]))
        barrier, served, refused = threading.Barrier(2), [], []

        def run(place, arena=arena, barrier=barrier, served=served, refused=refused):
            barrier.wait()
            try:
                out, _, after = step(arena, *models[place])
                served.append((place, np.asarray(out), after))
            except (RuntimeError, ValueError) as caught:
                refused.append(str(caught))

        threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (place, out, after), (error,) = *served, refused
        np.testing.assert_array_equal(out, wanted[place])
        held = after.read(spec_for(models[0][0]), "out")[:, :2].reshape(out.shape)
        np.testing.assert_array_equal(np.asarray(held), out)
        assert "deleted" in error or "donated" in error


def test_threads_with_an_arena_each_do_not_disturb_each_other():
    models = [attention(seed=seed) for seed in range(8)]
    wanted = [np.asarray(decode(*model)[0]) for model in models]
    step = donating()
    barrier, wrong = threading.Barrier(8), []

    def run(place):
        arena = Arena.allocate(spec_for(models[place][0])).poison()
        barrier.wait()
        for _ in range(20):
            out, _, arena = step(arena, *models[place])
            if not np.array_equal(np.asarray(out), wanted[place]):
                wrong.append(place)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_threads_do_not_race_for_one_engine(params):
    engine = Engine(Hybrid(SMALLEST), params, LIMITS)
    wanted = [done.tokens for done in engine.generate(prompts(3))]
    inside, go_on, found = threading.Event(), threading.Event(), []

    def hold(request, token):
        inside.set()
        go_on.wait(60)

    def serve():
        found.append([done.tokens for done in engine.generate(prompts(3), on_token=hold)])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert inside.wait(60)
        with pytest.raises(EngineBusyError):
            engine.generate(prompts(1))
    finally:
        go_on.set()
        thread.join()
    assert found == [wanted]


# 14 -----------------------------------------------------------------------------------------------


def test_two_lanes_do_not_share_scratch():
    one = spec_for(attention()[0])
    both = one + one
    assert both.nbytes == 2 * one.nbytes
    target, draft = attention(seed=1), attention(seed=2)
    arena = Arena.allocate(both).poison()
    first, _, arena = decode(*target, arena=arena)
    second, _, rest = decode(*draft, arena=arena.after(one))
    arena = arena.join(rest)
    for lane, args, out in ((arena, target, first), (arena.after(one), draft, second)):
        wanted = np.asarray(decode(*args)[0])
        np.testing.assert_array_equal(np.asarray(out), wanted)
        held = lane.read(one, "out")[:, :2].reshape(wanted.shape)
        np.testing.assert_array_equal(np.asarray(held), wanted)


def test_two_lanes_of_two_engines_do_not_share_scratch():
    """A draft and a target, each in both of two micro-batches: four scratches, all in flight."""
    one = spec_for(attention()[0])
    arenas = [Arena.allocate(one + one).poison() for _ in range(2)]
    models = [attention(seed=seed) for seed in range(4)]
    first = [decode(*models[place], arena=arenas[place]) for place in range(2)]
    both = [
        (out, *decode(*models[2 + place], arena=arena.after(one)))
        for place, (out, _, arena) in enumerate(first)
    ]
    ranges = []
    for place, (target, draft, _, arena) in enumerate(both):
        whole = dataclasses.replace(arena, start=())
        for lane, model, out in ((whole, place, target), (arena, 2 + place, draft)):
            wanted = np.asarray(decode(*models[model])[0])
            np.testing.assert_array_equal(np.asarray(out), wanted)
            held = lane.read(one, "out")[:, :2].reshape(wanted.shape)
            np.testing.assert_array_equal(np.asarray(held), wanted)
            for dtype, size in one.lanes:
                begin = lane.lanes[dtype].unsafe_buffer_pointer()
                begin += dict(lane.start).get(dtype, 0) * jnp.dtype(dtype).itemsize
                ranges.append((begin, begin + size * jnp.dtype(dtype).itemsize))
    ranges = sorted(each for each in ranges if each[0] < each[1])
    assert len(ranges) >= 4
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert sum(arena.nbytes for arena in arenas) == 4 * one.nbytes


def test_two_engines_in_flight_do_not_plan_for_one(params):
    engines = [Engine(Hybrid(SMALLEST), params, LIMITS) for _ in range(2)]
    addresses = [pointers(engine.state.arena) for engine in engines]
    assert not set(addresses[0]) & set(addresses[1])
    total = sum(engine.plan["arena"] for engine in engines)
    assert total == 2 * engines[0].state.arena.nbytes


# 15 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 2, 4, 8])
def test_several_tokens_a_row_do_not_write_past_their_region(q_len):
    args = attention(q_len=q_len, heads=24)
    spec = spec_for(args[0])
    guard = ArenaSpec.of("guard", bytes=((1024,), jnp.bfloat16))
    pattern = jax.lax.bitcast_convert_type(jnp.full(1024, 0xA5A5, jnp.uint16), jnp.bfloat16)
    arena = Arena.allocate(guard + spec + guard).poison()
    arena = arena.write(guard, "bytes", pattern)
    last = arena.after(guard).after(spec).write(guard, "bytes", pattern)
    arena = arena.join(last)
    out, _, inner = decode(*args, arena=arena.after(guard))
    np.testing.assert_array_equal(np.asarray(out), np.asarray(decode(*args)[0]))
    arena = arena.join(inner)
    for place in (arena, arena.after(guard).after(spec)):
        kept = np.asarray(place.read(guard, "bytes")).view(np.uint16)
        assert (kept == 0xA5A5).all()


def test_scratch_for_one_token_does_not_take_four():
    one, four = attention(heads=64), attention(q_len=4, heads=64)
    arena = Arena.allocate(spec_for(one[0]))
    with pytest.raises(ArenaError, match=r"region 'out' bfloat16\[3,256,16\] does not fit"):
        decode(*four, arena=arena)


# 16 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_the_output_is_not_a_view_of_another_dtype(dtype):
    args = attention(dtype=dtype)
    out, lse, _ = decode(*args, arena=Arena.allocate(spec_for(args[0])))
    assert out.dtype == dtype and lse.dtype == jnp.float32
    for other in {jnp.bfloat16, jnp.float16, jnp.float32} - {dtype}:
        # Room enough, and all of it of another dtype (a real spec has float32 partials as well).
        wrong = Arena.allocate(ArenaSpec.of("other", bytes=((2**20,), other)))
        with pytest.raises(ArenaError, match=f"of {jnp.dtype(dtype).name} scratch, but"):
            decode(*args, arena=wrong)


# 20 -----------------------------------------------------------------------------------------------


def test_counters_do_not_lie_in_scratch_and_scratch_does_not_survive():
    args = attention()
    counter = ArenaSpec.of("op", persistent={"op/done": ((4,), jnp.int32)})
    spec = spec_for(args[0]) | counter
    arena = Arena.allocate(spec)
    assert not arena.read(counter, "op/done").any()
    arena = arena.write(counter, "op/done", jnp.arange(4, dtype=jnp.int32))
    wanted = np.asarray(decode(*args)[0])
    for _ in range(2):
        arena = arena.poison()
        out, _, arena = decode(*args, arena=arena)
        np.testing.assert_array_equal(np.asarray(out), wanted)
        np.testing.assert_array_equal(arena.read(counter, "op/done"), range(4))
    assert all(size == 0 or dtype != "int32" for dtype, size in spec.lanes)


# 21 -----------------------------------------------------------------------------------------------


def test_donation_is_not_declined_silently():
    kept_steps(BUCKETS, config=RECURRENT)
    engine = Engine(Hybrid(RECURRENT), params_of(RECURRENT), BUCKETS)
    for name, step in engine.executables.items():
        report = check_aliasing(step)
        assert report.aliased_bytes == report.donated_bytes > 0, name

    entry = entry_points(LIMITS)[-1]
    state = jax.eval_shape(lambda: new_state(Hybrid(RECURRENT), LIMITS))
    batch = entry.batch_shapes(LIMITS)

    def forgets(params, state, batch):
        logits, after = entry.step(Hybrid(RECURRENT), LIMITS)(params, state, batch)
        return logits, changed(after, ssm_state=after.array("ssm_state").astype("float16"))

    naive = jax.jit(forgets, donate_argnums=1)
    with warnings.catch_warnings(), pytest.raises(AliasingError, match="ssm_state"):
        warnings.simplefilter("ignore")  # all that JAX says of it, and not always
        check_aliasing(naive.lower(packed_shapes(Hybrid(RECURRENT)), state, batch).compile())


# 19 -----------------------------------------------------------------------------------------------


def delta_rule(slots, num_slots=4, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    batch = len(slots)
    pool = draw(num_slots, 2, 8, 8)
    tokens = (draw(batch, 1, 1, 8), draw(batch, 1, 1, 8), draw(batch, 1, 2, 8))
    gates = (draw(batch, 1, 2), draw(batch, 1, 2))
    options = dict(A_log=draw(2), dt_bias=draw(2), implementation="xla")
    return pool, lambda pool, slots: gdn.gated_delta_rule_decode(
        *tokens, *gates, pool, jnp.asarray(slots, jnp.int32), **options
    )


@pytest.mark.parametrize("unused", [-1, 4, 2**31 - 1, -(2**31)])
def test_a_padding_row_does_not_write_into_a_live_slot(unused):
    """Slot 0 and the last one are live: -1 must not become either."""
    pool, step = delta_rule([0, 3, 0])
    o, after = jax.jit(step)(pool, [0, 3, unused])
    assert not np.asarray(o[2]).any()
    wanted_o, wanted = jax.jit(step)(pool, [0, 3, -1])
    np.testing.assert_array_equal(np.asarray(after), np.asarray(wanted))
    np.testing.assert_array_equal(np.asarray(after[1:3]), np.asarray(pool[1:3]))
    np.testing.assert_array_equal(np.asarray(o[:2]), np.asarray(wanted_o[:2]))

    naive = pool.at[jnp.asarray([0, 3, -1])].set(jnp.nan)  # JAX counts -1 from the end
    assert np.isnan(naive[3]).all()


# 17, 18 -------------------------------------------------------------------------------------------


def test_a_padding_row_does_not_keep_what_the_buffer_held():
    args = attention()
    arena = Arena.allocate(spec_for(args[0])).poison()
    out, lse, arena = decode(*args, arena=arena)
    assert not np.asarray(out[1], np.float32).any() and np.isneginf(lse[1]).all()

    buffer = np.full(out.shape, np.nan, np.float32)  # naive: the kernel skips a row of length 0
    buffer[[0, 2]] = np.asarray(out, np.float32)[[0, 2]]
    assert np.isnan(np.abs(buffer).max())  # and the FP8 scale of the whole batch with it


def test_an_empty_row_does_not_come_out_as_nan():
    q, cache, tables, lens = attention()
    out, lse = decode(q, jnp.full_like(cache, jnp.nan), tables, jnp.zeros_like(lens))
    assert not np.asarray(out, np.float32).any() and np.isneginf(lse).all()
    naive = jax.nn.softmax(jnp.full(3, -jnp.inf))  # -inf - -inf, then 0 / 0
    assert np.isnan(naive).all()


# 23 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [0x7F, 0xFF])
def test_a_page_that_held_another_dtype_is_not_read(fill):
    """A page of float32 states, given to a row whose first tokens are all that it has written."""
    q, cache, tables, lens = attention(dtype=jnp.float32)
    wanted = decode(q, cache, tables, lens)
    stale = np.full(cache.shape, 0, np.float32)
    stale.view(np.uint8)[...] = fill
    for row, length in enumerate(np.asarray(lens)):
        for position in range(length):
            page = int(tables[row, position // 64])
            stale[page, position % 64] = np.asarray(cache)[page, position % 64]
    got = decode(q, jnp.asarray(stale), tables, lens)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    # naive: 0 x NaN in the product of probabilities and values
    assert fill == 0x7F or np.isnan(np.zeros(64) @ stale[tables[0, 0], :, 0])
