"""The benchmark of a whole model on a tiny one: its counting, its random weights, its report."""

import contextlib
import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.bench import __main__ as bench
from jaxattn.bench.harness import timing
from jaxattn.bench.harness.materialized_arrays import materialized_arrays
from jaxattn.bench.harness.timing import KernelLaunch, KernelTimes
from jaxattn.bench.layers import linear
from jaxattn.bench.model import (
    command,
    expert_usage,
    model_lookup,
    op_categories,
    random_weights,
    roofline,
)
from jaxattn.bench.model import steps as steps_module
from jaxattn.bench.plots import result_plot
from jaxattn.core.numerics.four_bit_tiles import FourBitFormat, dequantize
from jaxattn.core.numerics.fp8_block_scaling import quantize
from jaxattn.core.numerics.fp8_weight_layout import interleave_columns
from tests.helpers.executables import with_locations

CONFIG = {
    "model_type": "deepseek_v2", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64,
    "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 0, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}  # fmt: skip
# As a profile of a GPU has them: a kernel of ours, XLA's and cuBLAS' products, copies.
LAUNCHES = {
    KernelLaunch("mla_decode_kernel", "custom-call.1"): KernelTimes(4e-5, 2.0),
    KernelLaunch("nvjet_tst_64x8", ""): KernelTimes(3e-5, 6.0),
    KernelLaunch("moe_gate_up", ""): KernelTimes(2e-5, 2.0),
    KernelLaunch("MemcpyD2D", ""): KernelTimes(1e-6, 1.0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@contextlib.contextmanager
def with_callers():
    """Operations know where they come from, as they do outside of this suite."""
    name, none = "jax_traceback_in_locations_limit", jax.config.jax_traceback_in_locations_limit
    jax.config.update(name, 20)
    try:
        with with_locations():
            yield
    finally:
        jax.config.update(name, none)


@pytest.fixture(scope="module")
def ran(folder, tmp_path_factory):
    """One run of the command on the tiny model: its JSON, what it printed, and its steps."""
    file, kept = tmp_path_factory.mktemp("run") / "run.json", []

    def keep(*args, **kwargs):
        kept.append(steps_module.ModelSteps(*args, **kwargs))
        return kept[-1]

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(command, "ModelSteps", keep)
        patch.setattr(steps_module, "launches", lambda call, *, calls: LAUNCHES)
        patch.setattr(steps_module, "RUN_SECONDS", 1e-3)
        argv = ["--rows", "3", "--context", "70", "--prompt", "70", "--chunks", "64"]
        with with_callers():
            code = bench.main(["model", str(folder), *argv, "--json", str(file), "--seed", "5"])
    assert code == 0
    return json.loads(file.read_text()), said.getvalue(), kept[0]


def test_a_run_names_what_it_ran_on_and_how(ran, folder):
    run, said, _ = ran
    assert run["model"] == folder.name and run["seed"] == 5 and run["layers"] == 2
    assert "model" in run["command"] and "--seed 5" in run["command"]
    assert {"jax", "device", "commit", "copy_GB_s", "matmul_TFLOP_s", "card"} <= run.keys()
    assert "decode 3: kernel time by category" in said


def test_a_decode_step_stands_beside_the_roof_of_its_bytes(ran):
    run, _, _ = ran
    decode, prefill = run["rows"]
    assert (decode["step"], decode["B"], decode["T"]) == ("decode", 3, 70)
    assert decode["times roof"] == pytest.approx(decode["ms"] / decode["roof ms"])
    assert decode["roof ms"] == pytest.approx(decode["GB"] / run["roof_GB_s"] * 1e3)
    over = (decode["ms"] - decode["roof ms"]) * 1e3 / 2
    assert decode["us a layer over roof"] == pytest.approx(over)
    assert decode["tokens/s"] == pytest.approx(3e3 / decode["ms"])
    assert decode["kernels ms"] == pytest.approx(0.091)
    assert decode["launches"] == 11
    assert (prefill["step"], prefill["T"], prefill["chunk"]) == ("prefill", 70, 64)
    assert prefill["TFLOP/s"] == pytest.approx(prefill["TFLOP"] / prefill["ms"] * 1e3)


def test_the_time_is_divided_among_kinds(ran):
    found = {each["kind"]: each for each in ran[0]["kinds"]["decode 3"]}
    assert list(found) == ["attention", "experts", "dense products", "copies"]
    assert found["attention"]["us"] == pytest.approx(40)
    assert found["dense products"]["launches"] == 6
    assert found["experts"]["us a layer"] == pytest.approx(10)
    assert found["copies"]["GB/s"] == "" and found["copies"]["us a layer over roof"] == 0.5
    touched = np.mean(ran[0]["touched"]["3"]) + 1  # the shared one too
    experts_bytes = 2 * 3 * 64 * 32 * 2 * touched  # layers, bfloat16
    assert found["experts"]["GB/s"] == pytest.approx(experts_bytes / 20e-6 / 1e9)
    over = (20 - experts_bytes / ran[0]["roof_GB_s"] * 1e-3) / 2
    assert found["experts"]["us a layer over roof"] == pytest.approx(over)


def test_what_xla_made_is_found_by_scope_and_function(ran):
    _, _, steps = ran
    (compiled,) = [f.result() for entry, f in steps._compiled.items() if entry.kind == "decode"]
    origins = op_categories.origins_of(compiled.as_text())
    of_kind = {}
    for origin in origins.values():
        of_kind.setdefault(op_categories.kind_of("fusion", origin), []).append(origin)
    # Lists of long words: what pytest would say of them takes minutes.
    words = {"norms": "rms_norm", "dense products": "mla_o_proj", "attention": "/mla_decode/"}
    for kind, word in words.items():
        found = any(word in origin for origin in of_kind[kind])
        assert found, kind
    routed = [o for o in of_kind["router"] if "/router_logits/" in o]
    scored = [o for o in of_kind["router"] if "top_k" in o]
    strange = [o for o in of_kind["experts"] if "MixtureOfExperts" not in o]
    assert (len(routed) > 0, len(scored) > 0, len(strange)) == (True, True, 0)
    assert all("/sample/" in origin for origin in of_kind["sampling"])


@pytest.mark.parametrize(
    ("kernel", "origin", "kind"),
    [
        ("mla_decode_columns", "", "attention"),
        ("loop_multiply_fusion", "jit(f)/gqa_decode/dot_general ", "attention"),
        ("nvjet_tst_64x8", "jit(f)/gqa_qkv_proj/dot_general _dot ", "dense products"),
        ("linear_layer", "/mla_o_proj/linear_layer/ ", "dense products"),
        ("nvjet_tst_64x8", "jit(f)/while/body/mlp/dot_general _dot ", "dense products"),
        ("nvjet_tst_64x8", "jit(f)/router_logits/linear_layer/dot_general body ", "router"),
        ("loop_add_fusion", "jit(f)/add body MixtureOfExperts.step ", "experts"),
        ("nvjet_tst_64x8", "ragged_dot_general mixture_of_experts _grouped ", "experts"),
        ("loop_dynamic_slice_fusion", "jit(f)/mlp/dot_general ", "copies"),
        ("moe_combine", "", "experts"),
        ("loop_add_fusion", "jit(f)/add DecoderNetwork.decode ", "other"),
    ],
)
def test_a_kernel_is_of_the_kind_that_its_name_or_its_origin_says(kernel, origin, kind):
    assert op_categories.kind_of(kernel, origin) == kind


def test_a_fusion_that_says_nothing_is_of_the_kind_of_its_product():
    text = """HloModule m

%gemm (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  %d.1 = f32[2]{0} custom-call(%p), custom_call_target="x", metadata={op_name="mlp/dot_general"}
  ROOT %b = f32[2]{0} bitcast(%d.1), metadata={op_name="reshape"}
}

ENTRY %main (q: f32[2]) -> f32[2] {
  %q = f32[2]{0} parameter(0)
  ROOT %slice-fusion.3 = f32[2]{0} fusion(%q), kind=kCustom, calls=%gemm
}
"""
    assert op_categories.origins_of(text)["slice_fusion_3"].split() == ["mlp/dot_general"]


def test_a_frame_is_found_with_all_that_called_it():
    text = """HloModule m

FileNames
1 "a.py"

FunctionNames
1 "outer"
2 "route"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1}
2 {file_name_id=1 function_name_id=2 line=2}

StackFrames
1 {file_location_id=1 parent_frame_id=PARENT_1}
2 {file_location_id=2 parent_frame_id=PARENT_2}

ENTRY %main (p: f32[2]) -> f32[2] {
  ROOT %add.3 = f32[2]{0} add(%p, %p), metadata={op_name="jit(f)/add" stack_frame_id=2}
}
"""
    for first, second in ((1, 2), (0, 1)):  # both ways in which versions of XLA count parents
        said = text.replace("PARENT_1", str(first)).replace("PARENT_2", str(second))
        assert op_categories.origins_of(said) == {"add_3": "jit(f)/add outer route "}


def test_experts_are_counted_from_the_rows_of_the_run(ran):
    run, _, steps = ran
    touched = run["touched"]["3"]
    assert len(touched) == 2 * steps_module.STEPS
    assert all(2 <= count <= 6 for count in touched) and len(set(touched)) > 1
    assert run["rows"][0]["experts"] == pytest.approx(np.mean(touched))
    assert run["rows"][0]["uniform"] == pytest.approx(8 * (1 - (1 - 2 / 8) ** 3))


def test_rows_that_choose_alike_touch_no_more_experts_than_one(ran):
    *_, steps = ran
    flat = nnx.to_flat_state(steps.params.params)
    alike = [(k, v.replace(jnp.zeros_like(v[...])) if "router" in k else v) for k, v in flat]
    params = dataclasses.replace(steps.params, params=nnx.from_flat_state(alike))
    batches = [steps.rows.decode(3, step) for step in range(2)]
    found, steps.state = expert_usage.distinct(steps.model, params, steps.state, batches, (1, 3))
    assert found == {1: [2] * 4, 3: [2] * 4}


def test_experts_that_were_called_unseen_are_an_error(ran, monkeypatch):
    *_, steps = ran
    monkeypatch.setattr(
        expert_usage, "jit_step", lambda *_, **__: lambda params, state, batch: (0, state)
    )
    with pytest.raises(
        RuntimeError, match="0 calls of experts were recorded in 1 steps of 2 layers"
    ):
        expert_usage.distinct(steps.model, steps.params, steps.state, [None], (3,))


def test_rows_of_a_batch_have_pages_and_slots_of_their_own(ran):
    *_, steps = ran
    batch = steps.rows.decode(3, 0)
    tables = np.asarray(batch.block_tables)[:, :2]
    assert len(np.unique(tables)) == tables.size and tables.max() < steps.rows.size.pages
    assert sorted(np.asarray(batch.state_indices)) == [0, 1, 2]
    assert (np.asarray(batch.seq_lens) == 70).all()
    other = steps.rows.decode(3, 1)
    assert (np.asarray(other.tokens) != np.asarray(batch.tokens)).any()
    first, last = steps.rows.chunks(64)
    assert (int(first.query_lens[0]), int(first.seq_lens[0])) == (64, 64)
    assert (int(last.query_lens[0]), int(last.seq_lens[0])) == (6, 70)


def test_random_weights_keep_activations_finite_and_of_order_1(ran):
    *_, steps = ran
    logits, steps.state = jax.jit(steps.model.decode)(
        steps.params, steps.state, steps.rows.decode(3, 0)
    )
    assert 0.3 < np.std(logits) < 3
    norms = np.asarray(steps.params.norms)
    assert 0.9 < norms.mean() < 1.1 and 0 < norms.std() < 0.2
    latents = np.asarray(steps.state.array("kv_cache"), np.float32)
    assert 0.9 < latents.std() < 1.1


def filled(shape, dtype, draw, name="w"):
    return random_weights.filled([name], [jax.ShapeDtypeStruct(shape, dtype)], [draw], 0)[0]


def test_a_leaf_is_filled_block_by_block_without_repeating_itself(monkeypatch):
    monkeypatch.setattr(random_weights, "BLOCK", 2**10)
    shape = (4, 96, 64)
    array = np.asarray(
        filled(shape, jnp.bfloat16, random_weights.UniformRange.of(0.5, 2.0)), np.float32
    )
    assert array.mean() == pytest.approx(2, abs=0.02) and array.std() == pytest.approx(
        0.5, abs=0.02
    )
    rows = array.reshape(-1, 64)
    assert len(np.unique(rows, axis=0)) == len(rows)
    whole = random_weights._compiled(shape, "bfloat16").memory_analysis()
    assert whole.output_size_in_bytes == 2 * 4 * 96 * 64
    assert whole.temp_size_in_bytes < 32 * 2**10 + whole.output_size_in_bytes / 2


def test_fp8_weights_are_finite_and_their_scales_bring_them_back(folder):
    _, _, model = model_lookup.find(str(folder))
    leaf = jax.ShapeDtypeStruct((2, 8, 64, 128), jnp.float8_e4m3fn)
    scale = jax.ShapeDtypeStruct((2, 8, 1, 1), jnp.float32)
    name = "segments.0.layers.0.mlp.gate_up"
    values = np.asarray(
        filled(leaf.shape, leaf.dtype, random_weights.draw_of(name, leaf, model)), np.float32
    )
    assert np.isfinite(values).all() and values.max() == 448
    scales = filled(scale.shape, scale.dtype, random_weights.draw_of(f"{name}_scale", scale, model))
    assert (np.asarray(scales) > 0).all()
    assert np.std(values * np.asarray(scales)) == pytest.approx(64**-0.5, rel=0.05)


@pytest.mark.parametrize(
    "form",
    [FourBitFormat("mxfp4", 32, "e8m0"), FourBitFormat("int4", 128, "float16", zeros=True)],
    ids=str,
)
def test_weights_of_4_bits_have_the_deviation_of_others(form):
    leaf = (2, 3, *form.tiles(128, 256))
    draw = random_weights.RandomTiles(form, 256**-0.5)
    wide = np.asarray(dequantize(filled(leaf, jnp.uint8, draw), form, jnp.float32))
    assert np.isfinite(wide).all()
    assert np.std(wide) == pytest.approx(256**-0.5, rel=0.4)  # E8M0 has powers of two


def test_a_leaf_that_is_no_float_is_refused_by_name():
    with pytest.raises(ValueError, match="latents.kv_cache is uint8"):
        filled((2, 2), jnp.uint8, random_weights.UniformRange.of(1.0), "latents.kv_cache")


def test_the_bytes_of_a_published_model_are_those_of_its_configuration():
    _, fields, model = model_lookup.find("deepseek-v2-lite")
    hidden, layers, moe = fields["hidden_size"], 27, 26
    attention = 2048 * 3072 + 2048 * 576 + 512 + 512 * 16 * (128 + 128) + 16 * 128 * 2048
    norms, dense_mlp = (2 * layers + 1) * hidden, 3 * hidden * 10944
    head, always = hidden * 102400, 2  # as many experts' columns have the shared ones
    router = moe * hidden * 64  # float32
    fixed = layers * attention + norms + dense_mlp + head
    moved = roofline.moved(model, 32, 4096, 16.0)
    assert moved.weights == 2 * fixed + 4 * router
    assert moved.experts == 2 * moe * (16 + always) * 3 * hidden * 1408
    assert moved.pages == 32 * 4096 * layers * 576 * 2 and moved.states == 0
    assert moved.total == moved.weights + moved.experts + moved.pages


def test_the_operations_of_prefill_are_those_of_its_matrices_and_its_attention(folder):
    _, _, model = model_lookup.find(str(folder))
    tokens = 10
    attention = 2 * 2 * (16 + 8 + 16) * tokens * (tokens + 1) / 2
    q, kv, o, up = 64 * 48, 64 * 40, 32 * 64, 2 * 32 * 16 * 2
    moe = 64 * 8 + (2 + 1) * 3 * 64 * 32  # the router, two experts of eight and the shared one
    total, unknown = roofline.flops(model, tokens)
    assert total == 2 * (2 * tokens * (q + kv + o + up + moe) + attention) + 2 * 64 * 96
    assert unknown == []


def test_the_roof_is_the_cards_rate_or_what_was_copied():
    assert roofline.rate("NVIDIA H200", 1.0) == 4.0e12
    assert roofline.rate("NVIDIA H100 80GB HBM3", 1.0) == 2.9e12
    assert roofline.rate("cpu", 5.0) == 5.0


def test_launches_are_counted_per_call(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    calls = []

    def record(run):
        calls.clear()
        run()
        n = len(calls)
        twice = [(at, 2000.0) for at in range(2 * n)]
        return {KernelLaunch("k", "a.1"): twice, KernelLaunch("MemcpyH2D", ""): [(0, 9.0)] * n}

    monkeypatch.setattr(timing, "gpu_launches", record)
    found = timing.launches(calls.append, warmup=1e-3, calls=3)
    assert found == {KernelLaunch("k", "a.1"): KernelTimes(pytest.approx(4e-6), 2.0)}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing"], "use one of DeepSeek-R1"),
        (["OTHER"], "model_type 'unheard_of' is not supported"),
        (["FOLDER", "--rows", "0"], "--rows must be positive"),
        (["FOLDER", "--context", "300"], "supports 256 tokens; got 8,192"),
        (["FOLDER", "--json", "/nowhere/x.json"], "cannot be written"),
    ],
)
def test_a_model_that_cannot_be_run_is_refused_before_it_is(
    argv, message, folder, tmp_path, capsys
):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "unheard_of"}))
    folders = {"FOLDER": str(folder), "OTHER": str(tmp_path)}
    argv = [folders.get(word, word) for word in argv]
    argv += ["--prompt", "64", "--context", "64"] if "/nowhere/x.json" in argv else []
    with pytest.raises(SystemExit) as stopped:
        bench.main(["model", *argv])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_step_that_fails_is_a_row_with_the_reason():
    def fail():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB\nmore")

    row, found = steps_module.attempt(fail, "prefill by 8192")
    assert row == {"step": "prefill by 8192", "error": "RESOURCE_EXHAUSTED: 9 GiB"} and not found


def test_bars_of_a_run_are_drawn(ran, tmp_path):
    pytest.importorskip("matplotlib")
    result_plot.save(ran[0], tmp_path / "model.png")
    assert (tmp_path / "model.png").exists()
    with pytest.raises(result_plot.BenchPlotError, match="no decode steps"):
        result_plot.save({"what": "model", "rows": []}, tmp_path / "x.png")


def test_every_way_of_a_product_is_the_same_product():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((4, 32), (3, 32, 48)))
    last = np.asarray(x[0], np.float64) @ np.asarray(w[-1], np.float64)[:, 0]
    turned = w.swapaxes(1, 2)
    numbers, scales = quantize(turned)
    stacks = (w,), (turned,), (w,), (interleave_columns(numbers), scales)
    for way, stack in zip(linear.WAYS, stacks, strict=True):
        seen, _ = linear.loop(x, stack, way=way, implementation="xla")
        limit = 1e-2 if way != linear.WAYS[3] else 0.1  # FP8 numbers have four bits
        assert float(seen) == pytest.approx(last, rel=limit, abs=0.1)


def test_a_product_that_models_share_is_measured_once():
    found = linear.products(linear.MODELS, [1, 8], linear.WAYS[:2])
    shared = linear.LinearCase(1, 2048, 576, linear.WAYS[0])
    assert found[shared] == ["DeepSeek-V2-Lite kv_a_proj", "GLM-4.7-Flash kv_a_proj"]
    assert len(found) == 4 * len({(p.inner, p.outer) for p in found})


def test_the_products_of_a_shipped_model_are_those_of_its_parameters():
    _, _, model = model_lookup.find("DeepSeek-V2-Lite")
    shapes = {leaf.shape[1:] for keys, leaf in roofline.leaves_of(model) if "weight" in keys
              and keys[0] == "segments" and leaf.ndim == 3}  # fmt: skip
    listed = set(linear.MODELS["DeepSeek-V2-Lite"].values()) - {(2048, 102400)}
    assert listed in (shapes, {shape[::-1] for shape in shapes})


def test_what_a_loop_writes_is_found_and_what_it_updates_in_place_is_not():
    def step(state, stack):
        def body(carry, each):
            state, _ = carry
            turned = jax.lax.optimization_barrier(each.T * 2)
            return (state.at[3].set(turned[0, 0]), turned[1, 1]), None

        carry, _ = jax.lax.scan(body, (state, jnp.float32(0)), stack)
        return carry

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096,), (5, 64, 32))]
    text = jax.jit(step, donate_argnums=0).lower(*shapes).compile().as_text()
    (found,) = materialized_arrays(text, min_bytes=4096)
    assert (found.array, found.nbytes, found.loop) == ("f32[32,64]", 8192, True)
    assert str(found).startswith("f32[32,64], 0.0 MiB in each iteration (")


def test_dense_products_are_shown_and_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing, "ROTATE_BYTES", 2**15)
    file = tmp_path / "dense.json"
    assert bench.main(["dense", "--small", "--rows", "1", "--json", str(file)]) == 0
    run = json.loads(file.read_text())
    assert [row["way"] for row in run["rows"]] == [*linear.WAYS, *linear.WAYS]
    assert {row["of"] for row in run["rows"]} == {"small q_proj", "small o_proj"}
    assert all(row["GB/s"] > 0 and row["us"] == row["call us"] for row in run["rows"])
    assert "dense products on cpu" in capsys.readouterr().out


def test_a_run_without_a_checkout_or_a_card_says_so(monkeypatch):
    from jaxattn.bench.harness import device_info, run_metadata

    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(device_info.subprocess, "run", missing)
    assert run_metadata.commit() == "" and device_info.card() == {}
