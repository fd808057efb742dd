"""The memory plan: what it says without a device, and that engines then take exactly that."""

import dataclasses
import functools
import gc
import io
import json
import re
import sys
import time
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxattn import gqa, mla
from jaxattn.cli.plan import main
from jaxattn.engine.startup.executable_memory import bound_of
from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.engine.steps.engine_state import new_state
from jaxattn.engine.steps.step_catalog import entry_points
from jaxattn.engine.steps.step_interface import int32
from jaxattn.limits import Limits
from jaxattn.memory.device_memory import DeviceError, DeviceMemory, known_device
from jaxattn.memory.temp_bound import LIBRARY_WORKSPACE, temp_bound
from jaxattn.models.catalog import model_resolver
from jaxattn.models.embedded.hybrid_model import Hybrid
from jaxattn.models.interface import DecodeBatch, PrefillBatch, jit_step, overlaid
from jaxattn.plan import MemoryBudget, MemoryPlan, PlanError, PlanItem, plan, solve
from jaxattn.plan.alternative_scratch_designs import published, split_kv_workspace
from jaxattn.plan.estimated_plan import plan_group
from jaxattn.plan.placement import ModelPlacement
from jaxattn.plan.plan_display import bar, print_plan
from tests.helpers.engine_cases import CONFIG, LIMITS, RECURRENT, SMALLEST
from tests.helpers.fake_hub import FakeHub, files_of, use
from tests.helpers.model_cases import state_of

GIB = 2**30
YOUTU = Path(__file__).parent.parent / "data" / "tiny_checkpoints" / "youtu"
SERVING = Limits(
    batch=128,
    max_model_len=8192,
    prefill_chunk=512,
    prefill_rows=1,
    checkpoints=0,
    decode_buckets=(),
    prefill_buckets=(),
)

# Groups of GPUs ----------------------------------------------------------------------------------


def scratch_of(made, op):
    """Bytes of one op's regions in a plan's arena."""
    [arena] = [item for item in made.items if item.name == "arena"]
    return sum(part.nbytes for part in arena.parts if part.name.startswith(f"{op} "))


def mla_scratch(heads):
    return mla.scratch(batch=128, q_len=1, num_heads=heads, max_pages=SERVING.pages_per_row)


@pytest.mark.slow(
    reason="experts or scratch of another number of GPUs; found by the table of DeepSeek-R1 and by "
    "the cuts of parallel/test_loading too"
)
@pytest.mark.usefixtures("untraced_bounds")
def test_r1_on_8_and_16_gpus_leaves_this_cache():
    plans = {
        gpus: plan(
            model_resolver.load("DeepSeek-R1"), "h200", SERVING, placement=ModelPlacement(gpus=gpus)
        )
        for gpus in (8, 16)
    }
    for gpus, made in plans.items():
        experts = {part.name: part.nbytes for part in made.items[0].parts}["experts weights"]
        assert experts == 58 * (256 // gpus) * (3 * 7168 * 2048 + 3 * 16 * 56 * 4)
        # Outputs of 128 rows, and two partial results of each of 66 parts.
        attention = 128 * 128 * 512 * 2 + 66 * 2 * 128 * 512 * 4
        assert scratch_of(made, "mla_decode") == attention
        # All GPUs' rows may choose the experts of one of them.
        spec = model_resolver.load("DeepSeek-R1").model.spec
        experts = spec.blocks[-1].feed_forward.scratch(spec.stream, 128 * gpus)
        assert made["arena"] == overlaid((experts, mla_scratch(128))).nbytes
        assert made.reserve >= 0
    assert plans[16]["kv cache"] > plans[8]["kv cache"]
    page = 61 * 64 * 576 * 2
    for made in plans.values():
        assert made["kv cache"] % page == 0 and made.reserve < page + made["arena"]


@pytest.mark.usefixtures("untraced_bounds")
def test_an_mla_cache_is_whole_on_every_gpu_and_heads_are_divided():
    r1 = model_resolver.load("DeepSeek-R1")
    limits = dataclasses.replace(SERVING, num_pages=100)
    one = plan(r1, "400GiB", limits, placement=ModelPlacement(gpus=8, attention="data"))
    divided = plan(r1, "400GiB", limits, placement=ModelPlacement(gpus=8, attention="tensor"))
    assert divided["kv cache"] == one["kv cache"] == 100 * 61 * 64 * 576 * 2
    assert divided["weights"] < one["weights"]
    # Of 16 heads no more is kept than there is, and twice as many parts run at a time.
    assert scratch_of(one, "mla_decode") == 128 * 128 * 512 * 2 + 66 * 2 * 128 * 512 * 4
    assert scratch_of(divided, "mla_decode") == 128 * 16 * 512 * 2 + 132 * 2 * 16 * 512 * 4

    qwen = model_resolver.load("Qwen3-Next-80B-A3B")
    caches = {
        gpus: plan(qwen, "400GiB", limits, placement=ModelPlacement(gpus=gpus, attention="tensor"))[
            "kv cache"
        ]
        for gpus in (1, 2, 4)
    }
    assert caches[2] == caches[1] // 2 == caches[4]  # two key-value heads: four GPUs hold copies


@pytest.mark.usefixtures("untraced_bounds")
def test_a_float8_cache_is_half_and_states_are_a_slot_a_row():
    kimi = model_resolver.load("Kimi-Linear-48B-A3B")
    limits = dataclasses.replace(SERVING, num_pages=100)
    wide = plan(kimi, "h200", limits)
    narrow = plan(kimi, "h200", limits, placement=ModelPlacement(cache_dtype="float8"))
    assert narrow["kv cache"] == wide["kv cache"] // 2 == 7 * 100 * 64 * 576
    assert wide["ssm state"] == 20 * 128 * 32 * 128 * 128 * 4
    assert wide["conv state"] == 20 * 128 * 3 * (3 * 4096) * 2


def test_what_others_would_have_taken():
    naive = [each.nbytes for each in published()]
    assert naive == [
        16_374_562_816,
        66_956_820_480,
        42_405_986_304,
        17_448_304_640,
    ]
    gib = [f"{size / GIB:.3f}" for size in naive]
    assert gib == ["15.250", "62.358", "39.494", "16.250"]
    assert published()[0].arena_bytes == 268_435_456
    # Partial results of split attention: of neither layers, nor context, nor batch.
    parts, rows, dim = 132, 8, 128
    bound = 2 * parts * rows * 4 * (dim + 1)
    assert [each.arena_bytes for each in published()[1:]] == [bound] * 3
    assert bound <= 2 * 2**20


def test_the_documents_table_of_what_others_would_have_taken_is_counted():
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    for case in published():
        sizes = f"{case.nbytes / GIB:.2f} GiB | {case.arena_bytes / 2**20:.2f} MiB"
        assert f"\n| {case.name} | {sizes} |\n" in page


@pytest.mark.parametrize("rows", [1, 64, 2048])
def test_attentions_scratch_is_no_more_with_a_longer_context(rows):
    """So that a larger cache takes nothing from itself, and nothing has to be solved for."""
    sizes = {
        gqa.scratch(
            batch=rows, q_len=1, num_heads=64, num_kv_heads=8, head_dim=128,
            max_pages=tokens // 64, page_size=64,
        ).nbytes
        for tokens in (4096, 40_960, 1_048_576)
    }  # fmt: skip
    assert len(sizes) == 1


# The fixed point ----------------------------------------------------------------------------------


@given(
    st.integers(0, 10_000),
    st.integers(1, 50),
    st.lists(st.integers(0, 400), min_size=1, max_size=30),
    st.none() | st.integers(0, 300),
)
def test_pages_and_workspace_fit_and_one_page_more_does_not(available, page, steps, most):
    levels = sorted(steps)

    def workspace(pages):  # any function that does not fall
        return levels[min(pages, len(levels) - 1)] + pages // 7

    found = solve(available, page, workspace, max_pages=most)
    room = available - found.pages * page - workspace(found.pages)
    assert room >= 0 or found.pages == 0
    after = found.pages + 1
    if most is None or after <= most:
        assert after * page + workspace(after) > available
    highs, lows = zip(*found.steps, strict=True)
    assert list(highs) == sorted(highs, reverse=True) and list(lows) == sorted(lows)


def test_sglangs_workspace_is_sized_by_what_its_cache_holds():
    # 16.25 GiB were asked for beside 25,432 cached tokens with 4.23 GiB free: sized by the context.
    rows = dict(rows=2048, heads=32, dim=128)
    whole = split_kv_workspace(**rows, tokens=131_072)
    token = 32 * 2 * 8 * 128 * 2
    budget = 25_432 * token + int(4.23 * GIB)
    assert 25_432 * token + whole > budget

    def workspace(tokens):
        return split_kv_workspace(**rows, tokens=min(tokens, 131_072))

    held = solve(budget, token, workspace, max_pages=25_432)
    assert held.pages == 25_432 and held.workspace <= 3.18 * GIB
    assert held.pages * token + held.workspace <= budget
    free = solve(budget, token, workspace)
    assert free.pages > 25_432 and free.pages * token + free.workspace <= budget
    assert len(free.steps) <= 12


# Budgets ------------------------------------------------------------------------------------------


def test_utilization_is_of_the_total_and_what_lies_outside_can_lower_it():
    budget = MemoryBudget("x", 1000, 0.9)
    assert budget.arrays() == budget.arrays(outside=100) == 900
    assert budget.arrays(outside=150) == 850
    assert MemoryBudget("x", 1000, 0.9, limit=700).arrays(outside=150) == 700
    assert MemoryBudget("x", 1000, 0.9).arrays(outside=2000) == 0


@pytest.mark.parametrize("value", [0, -0.1, 1.1, True, "0.9", float("nan")])
def test_a_utilization_that_is_no_fraction_is_refused(value):
    with pytest.raises(
        ValueError, match="utilization must be a fraction of the device's total memory"
    ):
        Limits(utilization=value)


def test_the_line_that_does_not_fit_is_named():
    items = (PlanItem("weights", 60, "w"), PlanItem("kv cache", 50, "k"), PlanItem("temp", 5, "t"))
    with pytest.raises(PlanError, match="115 .* 100 are allowed: 1 of 100 .* is the kv cache"):
        MemoryPlan(items, MemoryBudget("x", 100)).check()
    driver = (*items[:1], PlanItem("driver", 100, "d", outside=True))
    with pytest.raises(PlanError, match="the item that does not fit is the driver"):
        MemoryPlan(driver, MemoryBudget("x", 100)).check()


@pytest.mark.parametrize(
    "name, total", [("H200", 150_109_880_320), ("nvidia h100", 84_942_979_072), ("96GiB", 96 * GIB)]
)
def test_devices_have_names_or_sizes(name, total):
    assert known_device(name).total == total


@pytest.mark.parametrize("name", ["b200x", "", "GiB", "-4GiB", "0GiB", "1e9GiB"])
def test_an_unknown_device_is_refused_with_those_that_are_known(name):
    with pytest.raises(
        DeviceError, match="use one of h200, h100, h20, or its memory such as 96GiB"
    ):
        known_device(name)


@pytest.mark.usefixtures("untraced_bounds")
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["hybrid", "DeepSeek-V2-Lite"])
def test_a_plan_without_an_engine_takes_no_more_than_is_free(name):
    model, gib, limits = (
        (
            Hybrid(CONFIG),
            3,
            Limits(batch=2000, max_model_len=256, prefill_chunk=16, utilization=0.9),
        )
        if name == "hybrid"
        else (model_resolver.load(name), 60, dataclasses.replace(SERVING, utilization=0.9))
    )
    total = gib * GIB
    empty = plan(model, DeviceMemory("x", total), limits)
    free = empty.inside + empty["driver"] - empty["kv cache"] // 2
    made = plan(model, DeviceMemory("x", total, free=free), limits)
    assert made["in use"] == total - free
    assert made.inside + made["driver"] <= free < empty.inside + empty["driver"]
    assert 0 < made["kv cache"] < empty["kv cache"]
    said = f"{total:,} less {made.outside:,} outside of JAX's allocator (x)"
    assert made.budget.reason(made.outside) == said
    with pytest.raises(PlanError, match=r"less [\d,]+ outside of JAX's allocator"):
        plan(model, DeviceMemory("x", total, free=total // 8), limits)


def test_memory_that_contradicts_itself_is_refused():
    with pytest.raises(DeviceError, match="at least 1 byte"):
        DeviceMemory("x", 0)
    with pytest.raises(DeviceError, match="the free bytes must be from 0 to 1,000; got 2,000"):
        DeviceMemory("x", 1000, free=2000)


# The bound of temp --------------------------------------------------------------------------------


def shapes(config, *, rows, chunk, pages, held):
    state = jax.eval_shape(lambda: state_of(config, rows, held, rows, max_pages=pages))
    decode = DecodeBatch(int32(rows, 1), int32(rows), int32(rows, pages), int32(rows))
    one = int32(1)
    prefill = PrefillBatch(int32(1, chunk), one, one, int32(1, pages), one)
    return state, ((Hybrid(config).decode, decode), (Hybrid(config).prefill, prefill))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "change, rows, chunk",
    [({}, 4, 64), ({"num_repeats": 3, "gdn_per_repeat": 0}, 3, 200), ({"vocab_size": 5000}, 1, 16)],
    ids=["hybrid", "mla", "vocabulary"],
)
def test_temp_is_below_its_bound_and_a_larger_cache_does_not_raise_it(change, rows, chunk):
    config = dataclasses.replace(RECURRENT, **change)
    params = jax.eval_shape(Hybrid(config).pack, Hybrid(config).param_shapes())
    state, steps = shapes(config, rows=rows, chunk=chunk, pages=4, held=9)
    larger, _ = shapes(config, rows=rows, chunk=chunk, pages=4, held=9000)
    for step, batch in steps:
        traced = functools.partial(step, implementation="xla")
        bound = temp_bound(traced, params, state, batch, donated=1).temp
        compiled = jit_step(step, implementation="xla").lower(params, state, batch)
        temp = compiled.compile().memory_analysis().temp_size_in_bytes
        assert temp <= bound
        assert temp_bound(traced, params, larger, batch, donated=1).temp == bound


@pytest.mark.slow(
    reason="a copy of experts' weights; found by the temp of the hybrid, which is below its bound, "
    "too"
)
@pytest.mark.parametrize("dtype, size", [("bfloat16", 2), ("float32", 4)])
def test_temp_of_few_tokens_and_many_experts_is_below_its_bound(dtype, size):
    """The experts' weights are most of it: XLA copies a layer's out of the stack."""
    config = model_resolver.shipped_config("DeepSeek-V2-Lite") | {
        "vocab_size": 256,
        "hidden_size": 512,
        "intermediate_size": 512,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 0,
    }
    model = model_resolver.from_config("experts", config, "experts").model.with_dtype(dtype)
    limits = Limits(batch=1, max_model_len=64, prefill_chunk=16)
    params = packed_shapes(model)
    [prefill] = [entry for entry in entry_points(limits) if entry.kind == "prefill"]
    bound = bound_of(model, prefill, limits, params, "xla").temp
    state = jax.eval_shape(functools.partial(new_state, model, limits))
    step = jit_step(prefill.step(model, limits), implementation="xla", prefill=True)
    compiled = step.lower(params, state, prefill.batch_shapes(limits)).compile()
    temp = compiled.memory_analysis().temp_size_in_bytes
    assert size * 64 * 3 * 512 * 512 < temp <= bound


def test_a_second_copy_of_a_donated_buffer_counts():
    def step(x, buffer):
        return jax.lax.dynamic_update_slice(buffer, x, (0,)), buffer.sum() + (buffer * 2).sum()

    x, buffer = jax.ShapeDtypeStruct((4,), "float32"), jax.ShapeDtypeStruct((10**6,), "float32")
    assert temp_bound(step, x, buffer, donated=1).temp - LIBRARY_WORKSPACE == 4 * (10**6 + 2)


def test_what_a_call_returns_counts_once_and_a_view_of_it_not_at_all():
    def step(x, buffer):
        doubled = jax.jit(lambda x: jax.lax.expand_dims(x * 2, (0,)))(x)
        return buffer, jax.lax.squeeze(doubled, (0,)) + 1

    x, buffer = (jax.ShapeDtypeStruct((size,), "float32") for size in (1000, 4))
    # The product and the sum.
    assert temp_bound(step, x, buffer, donated=1).temp - LIBRARY_WORKSPACE == 4 * (1000 + 1000)


def test_what_a_call_passes_through_counts_where_it_is_written():
    def step(x, buffer):
        same = jax.jit(lambda buffer: buffer.at[0].set(1))(buffer)
        return same.at[1].set(2), x

    x, buffer = (jax.ShapeDtypeStruct((size,), "float32") for size in (1, 10**6))
    assert temp_bound(step, x, buffer, donated=1).temp - LIBRARY_WORKSPACE < 10**4


def test_a_barrier_costs_nothing_whatever_stands_before_the_donated_buffer_in_it():
    def step(x, buffer):
        doubled, buffer = jax.lax.optimization_barrier((x * 2, buffer))
        return buffer.at[0].set(doubled[0]), x

    x, buffer = (jax.ShapeDtypeStruct((size,), "float32") for size in (1, 10**6))
    assert temp_bound(step, x, buffer, donated=1).temp - LIBRARY_WORKSPACE < 10**4


@pytest.mark.slow_cases(
    reason="a copy of pages next to states; found by pages of the two other models too"
)
@pytest.mark.parametrize(
    "name",
    [
        "Qwen3-32B",
        "DeepSeek-V2-Lite",
        pytest.param("Qwen3-Next-80B-A3B", marks=pytest.mark.slow),
    ],
)
def test_steps_that_read_prompts_beside_rows_hold_no_copy_of_the_cache(name):
    model = model_resolver.load(name).model
    limits = [dataclasses.replace(SERVING, num_pages=pages) for pages in (10_000, 20_000)]
    first, second = (
        bound_of(model, entry_points(each)[0], each, packed_shapes(model), "xla").temp
        for each in limits
    )
    assert first == second


# Without a device ---------------------------------------------------------------------------------


def test_the_plan_of_the_decoder_needs_no_compiler_and_allocates_nothing(monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: pytest.fail("compiled"))
    gc.collect()  # of tests before
    before = len(jax.live_arrays())
    made = plan(Hybrid(RECURRENT), "2GiB", dataclasses.replace(LIMITS, num_pages=7))
    assert len(jax.live_arrays()) <= before
    assert {item.name: item.basis for item in made.items} == {
        "weights": "shapes",
        "rows": "shapes",
        "arena": "shapes",
        "kv cache": "shapes",
        "conv state": "shapes",
        "ssm state": "shapes",
        "step inputs and outputs": "bound",
        "xla temp": "bound",
        "xla code": "bound",
        "driver": "assumed",
    }


FEW_ROWS = Limits(batch=16, max_model_len=256, prefill_chunk=16)
MANY_ROWS = Limits(batch=2000, max_model_len=256, prefill_chunk=16, checkpoints=2000)


def device_for(pages, model):
    """Memory in which so many pages are left for many rows."""
    limits = dataclasses.replace(MANY_ROWS, num_pages=pages)
    return DeviceMemory("x", plan(model, "90GiB", limits).total)


@pytest.mark.usefixtures("untraced_bounds")
def test_without_pages_the_cache_gets_what_the_rest_leaves():
    made = plan(Hybrid(CONFIG), device_for(3000, Hybrid(CONFIG)), MANY_ROWS)
    pages = made["kv cache"] // (64 * 80 * 2)
    assert 2990 < pages <= 3000 < MANY_ROWS.wanted_pages
    assert 0 <= made.reserve < 10 * 64 * 80 * 2


@pytest.mark.slow(
    reason="advice whose temp does not fit; found by the share that is advised, which holds a row, "
    "and by temp that is below its bound, too"
)
def test_what_would_help_the_decoder_helps_with_its_temp_too():
    model = Hybrid(SMALLEST)  # one layer, as each batch that is tried is traced
    device = device_for(3, model)
    with pytest.raises(PlanError, match="pages are left, but one row of 256 .* needs 4") as caught:
        plan(model, device, MANY_ROWS)
    advised = re.fullmatch(r"batch ([\d,]+) with ([\d,]+) pages", caught.value.advice[0])
    batch, pages = (int(number.replace(",", "")) for number in advised.groups())
    smaller = dataclasses.replace(MANY_ROWS, batch=batch, num_pages=pages, utilization=0.9)
    assert plan(model, device, smaller).reserve >= 0


@pytest.mark.slow(
    reason="advice that does not fit; found by the share that is advised, which holds a row too"
)
@pytest.mark.parametrize(
    "model, limits, device, share, advised",
    [
        (Hybrid(CONFIG), FEW_ROWS, "2GiB", 0.001, "utilization"),
        ("DeepSeek-V2-Lite", SERVING, "h200", 0.1, "--utilization"),
    ],
)
def test_a_larger_share_of_the_device_is_advised_first(model, limits, device, share, advised):
    limits = dataclasses.replace(limits, utilization=share)
    model = model_resolver.load(model) if isinstance(model, str) else model
    with pytest.raises(PlanError) as caught:
        plan(model, device, limits)
    word, larger = caught.value.advice[0].split()
    assert word == advised and share < float(larger) <= 0.9
    assert plan(model, device, dataclasses.replace(limits, utilization=float(larger))).reserve >= 0


@pytest.mark.usefixtures("untraced_bounds")
def test_the_share_that_is_advised_holds_a_row_at_full_length():
    one = dataclasses.replace(CONFIG, max_position_embeddings=2**22)
    limits = Limits(batch=1, max_model_len=2**22, prefill_chunk=16, utilization=0.1)
    with pytest.raises(PlanError) as caught:
        plan(Hybrid(one), "2GiB", limits)
    (word, larger, *_) = caught.value.advice[0].split()
    assert word == "utilization" and float(larger) > 0.2
    made = plan(Hybrid(one), "2GiB", dataclasses.replace(limits, utilization=float(larger)))
    assert made.reserve >= 0 and made["kv cache"] >= limits.pages_per_row * 64 * 80 * 2


# The command --------------------------------------------------------------------------------------


@pytest.mark.slow_cases(
    reason="a search that grows with the GPUs; found by the table for 8 GPUs too"
)
@pytest.mark.parametrize("gpus", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_the_table_of_r1_comes_within_ten_seconds(gpus, capsys):
    before = time.process_time()
    assert main(["DeepSeek-R1", "--gpus", str(gpus), "--compare", "naive"]) == 0
    # Processor time: the tests beside this one take their share of the clock.
    assert time.process_time() - before < 10
    out = capsys.readouterr().out
    for part in ("weights", "arena", "kv cache", "xla temp", "bound", "assumed", "reserve"):
        assert part in out
    for gib in ("15.250", "62.358", "39.494", "16.250"):
        assert gib in out
    assert "chosen: batch" in out and "\u2588" in out


@pytest.mark.usefixtures("untraced_bounds")
def test_json_has_every_line_in_bytes(capsys):
    assert main(["deepseek-v2-lite", "--json", "--compare", "naive", "--device", "141GiB"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["fits"] and result["total"] == sum(item["nbytes"] for item in result["items"])
    assert result["inside_jax"] + result["outside_jax"] == result["total"]
    assert result["naive"][0]["name"] == "DeepSeek-V2-Lite"
    assert result["notes"]


@pytest.mark.usefixtures("untraced_bounds")
def test_a_layout_compares_what_one_of_its_gpus_has(capsys):
    """2 heads of 512 numbers in a layer, over 2 GPUs; 8 rows in 2 data groups."""
    command = f"{YOUTU} --tensor 2 --data 2 --gpus 4 --batch 8 --json --compare naive"
    assert main(command.split()) == 0
    found = json.loads(capsys.readouterr().out)["naive"][0]
    assert found["nbytes"] == 4 * 512 * 2


@pytest.mark.parametrize("more", ["--gpus 2", "--attention tensor", "--cache-dtype uint8"])
def test_what_a_layout_would_not_obey_is_refused(more, capsys):
    assert main(["DeepSeek-V2-Lite", "--tensor", "4", *more.split()]) == 2
    assert f"leave {more.split()[0]} out" in capsys.readouterr().err


@pytest.mark.usefixtures("untraced_bounds")
def test_a_model_that_does_not_fit_prints_the_table_the_line_and_what_would_help(capsys):
    assert main(["DeepSeek-R1", "--gpus", "4"]) == 2
    printed = capsys.readouterr()
    assert "missing" in printed.out and "weights" in printed.out
    assert "the item that does not fit is the weights" in printed.err
    assert "8 GPUs (--gpus 8)" in printed.err and printed.err.count("\n") == 1


@pytest.mark.usefixtures("untraced_bounds")
def test_the_fewest_gpus_are_advised_wherever_one_starts(capsys):
    # 7 ways divide neither its heads nor its experts.
    for gpus in (1, 6):
        assert main(["DeepSeek-R1", "--gpus", str(gpus)]) == 2
        assert "to make it fit, use 8 GPUs (--gpus 8)" in capsys.readouterr().err


@pytest.mark.usefixtures("untraced_bounds")
def test_a_group_that_no_layout_serves_is_counted_if_attention_says_how(capsys):
    assert main(["DeepSeek-R1", "--gpus", "4", "--attention", "data"]) == 2
    assert "to make it fit, use 7 GPUs (--gpus 7)" in capsys.readouterr().err
    assert main(["DeepSeek-R1", "--gpus", "7", "--attention", "data"]) == 0
    out = capsys.readouterr().out
    assert "one of them: 128 rows per GPU" in out and "layout" not in out.partition("- ")[0]


@pytest.mark.usefixtures("untraced_bounds")
def test_a_cache_that_does_not_hold_one_row_does_not_fit(capsys):
    arguments = ["DeepSeek-V2-Lite", "--device", "32GiB", "--utilization", "1", "--batch", "1"]
    assert main([*arguments, "--max-model-len", "160k", "--prefill-chunk", "64"]) == 2
    error = capsys.readouterr().err
    assert "the item that does not fit is the kv cache: " in error
    assert "one row of 163,840 tokens needs 2,560" in error
    for fix in ("2 GPUs", "--max-model-len"):
        assert fix in error, error


BAD_INPUT = {
    "nothing": ([], "give a model: DeepSeek-R1, DeepSeek-V2-Lite,"),
    "no name": ([""], "give a model: DeepSeek-R1, DeepSeek-V2-Lite,"),
    "model": (["DeepSeek-R9"], "unknown configuration 'DeepSeek-R9': use one of DeepSeek-R1,"),
    "folder": (["/"], "/config.json is missing"),
    "device": (["DeepSeek-R1", "--device", "v100"], "unknown device 'v100': use one of h200"),
    "gpus": (["DeepSeek-R1", "--gpus", "-8"], "argument --gpus: '-8' is not a size"),
    "no gpus": (["DeepSeek-R1", "--gpus", "0"], "argument --gpus: '0' is not a size"),
    "more gpus than experts": (
        ["DeepSeek-V2-Lite", "--gpus", "65", "--attention", "data"],
        "--gpus 65 exceeds DeepSeek-V2-Lite's 64 experts",
    ),
    "no layout": (
        ["DeepSeek-V2-Lite", "--gpus", "3", "--batch", "128"],
        "DeepSeek-V2-Lite has no layout for 3 GPUs; for 4 GPUs, use --data 4",
    ),
    "revision": (["DeepSeek-R1", "--revision", "main"], "--revision needs a name on the hub"),
    "heads": (
        ["DeepSeek-V2-Lite", "--gpus", "3", "--attention", "tensor"],
        "16 attention heads cannot be divided over 3 GPUs",
    ),
    "batch": (["DeepSeek-R1", "--batch", "0"], "argument --batch: '0' is not a size"),
    "absurd batch": (
        ["DeepSeek-R1", "--batch", "9999m"],
        "--batch must be at most 2,147,483,647, an int32; got 10,484,711,424",
    ),
    "length": (
        ["DeepSeek-R1", "--max-model-len", "1m"],
        "--max-model-len 1048576 exceeds DeepSeek-R1's 163,840",
    ),
    "utilization": (["DeepSeek-R1", "--utilization", "98"], "'98' is not a fraction"),
    "cache dtype": (["DeepSeek-R1", "--cache-dtype", "int4"], "invalid choice: 'int4'"),
    "bucket": (
        ["DeepSeek-R1", "--decode-buckets", "500", "--batch", "128"],
        "--decode-buckets 500 must be at most --batch 128",
    ),
    "chunk": (
        ["DeepSeek-R1", "--prefill-chunk", "4k", "--max-model-len", "2k"],
        "--prefill-chunk 4096 exceeds --max-model-len 2048",
    ),
    "pages": (
        ["DeepSeek-R1", "--gpus", "8", "--num-pages", "2", "--max-model-len", "2k"],
        "--num-pages 2 has room for only 128 tokens of --max-model-len 2048; give 32 pages",
    ),
    "another number of gpus": (
        ["DeepSeek-V2-Lite", "--tensor", "2", "--data", "2", "--gpus", "8"],
        "--gpus applies only to a plan without a layout, but --data 2 --tensor 2 is a layout of 4",
    ),
    "plot": (
        ["DeepSeek-V2-Lite", "--plot", "/no/such/folder/x.png"],
        ("cannot write /no/such/folder/x.png", "--plot needs matplotlib"),
    ),
}


@pytest.mark.parametrize("arguments, message", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m jaxattn.plan: error: ") and error.count("\n") == 1
    messages = (message,) if isinstance(message, str) else message
    assert any(part in error for part in messages), error


@pytest.mark.usefixtures("untraced_bounds")
def test_a_name_on_the_hub_is_planned_from_its_config_alone(tmp_path, monkeypatch, capsys):
    with FakeHub({"org/tiny": files_of(YOUTU)}).served() as hub:
        use(monkeypatch, hub.endpoint, tmp_path)
        assert main(["org/tiny", "--revision", "v1", "--json"]) == 0
        assert hub.got() == ["config.json"]
        named = json.loads(capsys.readouterr().out)
        assert main([str(YOUTU), "--json"]) == 0
        folder = json.loads(capsys.readouterr().out)
        assert named["items"] == folder["items"] and named["title"].startswith("org/tiny on")
        assert main(["org/none"]) == 2
    error = capsys.readouterr().err
    assert "org/none" in error and error.count("\n") == 1


@pytest.mark.usefixtures("untraced_bounds")
def test_a_folder_is_a_model_too(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps(model_resolver.shipped_config("DeepSeek-V2-Lite") | {"num_hidden_layers": 3})
    )
    assert main([str(tmp_path), "--json"]) == 0
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    assert main([str(tmp_path), "--batch", "4"]) == 0
    assert "xla temp" in capsys.readouterr().out
    assert main([str(tmp_path), "--gpus", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


def test_the_bar_is_as_wide_as_it_says_and_in_proportion():
    items = (
        PlanItem("weights", 50, ""),
        PlanItem("kv cache", 25, ""),
        PlanItem("driver", 5, "", outside=True),
    )
    text = bar(MemoryPlan(items, MemoryBudget("x", 100)), 40).plain
    line, legend = text.split("\n")
    assert line == "\u2588" * 32 + "\u2591" * 8
    assert "weights 50.0%" in legend and "free 20.0%" in legend


@pytest.mark.usefixtures("untraced_bounds")
def test_a_narrow_terminal_keeps_every_byte(capsys):
    console = Console(width=80, force_terminal=False)
    print_plan(console, plan(model_resolver.load("DeepSeek-V2-Lite"), "h200", SERVING))
    assert "31,420,537,600" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [79, 20])
def test_a_terminal_too_narrow_for_a_table_gets_a_list(columns):
    out = io.StringIO()
    console = Console(width=columns, file=out, force_terminal=True, color_system=None)
    made = plan_group(
        model_resolver.load("DeepSeek-R1"), known_device("h200"), SERVING, ModelPlacement()
    )
    print_plan(console, made, published())
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    for item in (*made.items, *made.items[0].parts):
        assert f"  {item.nbytes:,} B" in lines
    for each in published():
        assert f"  {each.nbytes:,} B" in lines and f"  {each.arena_bytes:,} B" in lines
    assert "missing" in lines and f"  {abs(made.reserve):,} B" in lines


def test_the_picture_is_a_png(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is in the extra 'plot'")
    assert main(["DeepSeek-V2-Lite", "--plot", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["DeepSeek-V2-Lite", "--plot", str(tmp_path / "plan.png")]) == 2
    assert "--plot needs matplotlib: install jaxattn[plot]" in capsys.readouterr().err
