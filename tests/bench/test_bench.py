"""The benchmark's counting, its peers in processes of their own, and its pictures; no times."""

import ast
import dataclasses
import errno
import functools
import io
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn
from jaxattn import mla as ops
from jaxattn.aliasing.checker import AliasingReport, BufferCopy
from jaxattn.bench import __main__ as bench
from jaxattn.bench.attention import gqa_prefill, mla, mla_fp8, mla_prefill
from jaxattn.bench.baselines import jax_triton_baselines, torch_delta_rule, torch_runner
from jaxattn.bench.harness import measured_peaks, result_tables, run_metadata, timing
from jaxattn.bench.layers import decode_step, moe
from jaxattn.bench.linear_attention import gdn_layer_decode, gdn_prefill, gdn_prefill_norm
from jaxattn.bench.plots import result_plot

STORED = "benchmarks/results/mla.json"

# As much of torch as a peer needs, in NumPy and without a GPU: a graph of calls takes 32 ms.
FAKE_TORCH = """
import contextlib, types
import numpy as np
bfloat16, float32, int8, int32, int64 = "bfloat16", "float32", "int8", "int32", "int64"
def made(*shape, dtype, device):
    assert device == "cuda"
    return np.zeros(shape)
randn = rand = empty = made
def tensor(values, dtype, device):
    return np.array(values)
no_grad = contextlib.nullcontext
replayed = []
class Event:
    def __init__(self, enable_timing): pass
    def record(self): self.at = len(replayed)
    def elapsed_time(self, end): return 32.0 * (end.at - self.at)
spans = []  # a call's kernel takes 700 us; ten calls are waited for
class Kernel:
    def __init__(self, number): self.number = number
    def start_ns(self): return 10**6 * self.number
    def duration_ns(self): return 700_000
    def device_type(self): return "cuda"
    def is_user_annotation(self): return False
    def name(self): return "kernel"
class Profile:
    def __init__(self, activities): self.profiler = types.SimpleNamespace(kineto_results=self)
    def __enter__(self): spans.clear(); return self
    def __exit__(self, *_): pass
    def events(self): return spans
profiler = types.SimpleNamespace(
    profile=Profile, ProfilerActivity=types.SimpleNamespace(CUDA="cuda")
)
autograd = types.SimpleNamespace(DeviceType=types.SimpleNamespace(CUDA="cuda"))
cuda = types.SimpleNamespace(
    synchronize=lambda: spans.extend([Kernel(len(spans) + i) for i in range(10)]),
    Event=Event, graph=lambda graph: contextlib.nullcontext(),
    CUDAGraph=lambda: types.SimpleNamespace(replay=lambda: replayed.append(1)),
)
"""
# FlashInfer's words, checked; it refuses 20 heads.
FAKE_FLASHINFER = """
import numpy as np
print("a library that talks")
class BatchMLAPagedAttentionWrapper:
    def __init__(self, workspace): pass
    def plan(self, *, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv,
             head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type):
        if num_heads == 20:
            raise ValueError("20 heads\\nare too odd")
        assert (head_dim_ckv, head_dim_kpe, page_size) == (512, 64, 64)
        assert (np.diff(kv_indptr) == -(-kv_len_arr // 64)).all()
        assert sorted(kv_indices) == list(range(kv_indptr[-1]))
        self.rows = qo_indptr[-1]
    def run(self, *, q_nope, q_pe, ckv_cache, kpe_cache):
        assert q_nope.shape[0] == q_pe.shape[0] == self.rows
        assert ckv_cache.shape[1:] == (64, 512) and kpe_cache.shape[1:] == (64, 64)
"""
# FlagGems' words, which are by place.
FAKE_FLAGGEMS = """
import numpy as np
__version__ = "5.0"
def flash_mla(q, tables, blocks, longest, page_size, batch, q_len, lengths, heads, kv_heads, dim,
              rank, causal):
    assert q.shape == (batch, q_len, heads, dim) and blocks.shape[1:] == (page_size, kv_heads, dim)
    assert (page_size, q_len, kv_heads, dim, rank, causal) == (64, 1, 1, 576, 512, True)
    pages = -(-lengths // page_size)
    assert tables.shape == (batch, longest // page_size) and pages.max() == tables.shape[1]
    used = [page for row, count in zip(tables, pages) for page in row[:count]]
    assert sorted(used) == list(range(blocks.shape[0]))
"""


@pytest.fixture
def fake_packages(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("__version__ = '9.9'")
    (tmp_path / "flashinfer" / "mla.py").write_text(FAKE_FLASHINFER)
    (tmp_path / "flag_gems.py").write_text(FAKE_FLAGGEMS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


@pytest.fixture
def timed(monkeypatch):
    """Nothing is compiled or checked: what would be is traced; kernels take 1 ms, a loop 2."""

    def times(op):
        out = jax.eval_shape(op.loop(1, 2), op.operands[0], op.state)
        after, before = (
            [(x.shape, x.dtype) for x in jax.tree.leaves(state)] for state in (out[1], op.state)
        )
        assert after == before
        return 1e-3, 2e-3

    def zeros(*static, inputs, **kwargs):
        shapes = jax.eval_shape(lambda: inputs(*static, **kwargs))
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)

    monkeypatch.setattr(timing.TimedOp, "times", times)
    monkeypatch.setattr(timing.TimedOp, "time", lambda op: times(op)[0])
    monkeypatch.setattr(timing.TimedOp, "__call__", lambda op, i=0: (None, None))
    monkeypatch.setattr(mla, "kernel_seconds", lambda op: 3e-3)
    for module in (mla, mla_prefill, gdn_layer_decode, gdn_prefill, gdn_prefill_norm, moe):
        monkeypatch.setattr(module, "check", lambda *_: 1e-3)
        monkeypatch.setattr(module, "inputs", functools.partial(zeros, inputs=module.inputs))
    monkeypatch.setattr(mla_prefill, "chunk", functools.partial(zeros, inputs=mla_prefill.chunk))
    monkeypatch.setattr(mla, "_schedules", lambda lens, **_: (None, None))


@pytest.fixture
def measured(monkeypatch):
    """Rows without measuring; returns the shapes that were asked for."""
    asked = []

    def measure(shape, implementation, *, xla, cache=None):
        if cache is None:
            asked.append(shape)
        beside = {"xla us": 90.0} if xla else {}
        return {"B,H,T,S": ",".join(map(str, shape)), "us": 10.0, **beside,
                "TFLOP/s": 1.0, "GB/s": 20.0}  # fmt: skip

    monkeypatch.setattr(mla, "measure", measure)
    return asked


def test_drawn_lengths_are_the_same_in_every_run_and_spread_evenly_to_as_many_tokens():
    drawn, even = mla.lengths(128, "1-8192"), mla.lengths(128, "even 1-8192")
    assert (drawn == mla.lengths(128, "1-8192")).all()
    assert drawn.min() >= 1 and drawn.max() <= 8192 and len(set(drawn)) > 100
    assert drawn.sum() == even.sum() and even.max() - even.min() <= 1
    assert drawn.dtype == even.dtype == np.int32
    assert (mla.lengths(3, 70) == 70).all()
    assert mla.lengths(4000, "1-2").max() == 2
    assert (mla.lengths(3, "70 of 512") == 70).all()
    assert mla.inputs(3, 2, "70 of 512", 1)[2].shape == (3, 8)


def test_mla_counts_flops_and_bytes_from_the_lengths(timed):
    row = mla.measure((3, 2, "1-70", 1), None, xla=True)
    assert [row[name] for name in ("us", "call us", "invariant us", "xla us")] == pytest.approx(
        [1000, 2000, 3000, 1000]
    )
    lens = [int(n) for n in mla.lengths(3, "1-70")]
    flops = sum(2 * n * 2 * (576 + 512) for n in lens)
    moved = sum(n * 576 * 2 + 2 * (576 + 512) * 2 for n in lens)
    assert row["TFLOP/s"] == pytest.approx(flops / 1e-3 / 1e12)
    assert row["GB/s"] == pytest.approx(moved / 1e-3 / 1e9)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (gdn_layer_decode, (1, 1, 1, 1, "float32")),
        (gdn_prefill, (1, 1, 2, 3)),
        (gdn_prefill_norm, (1, 1, 2, 3)),
        (mla_prefill, (1, 8, 1, 0)),
        (mla_prefill, (1, 8, 1, 8)),
        (mla_fp8, (1, 2, 70, 1, "e4m3")),
        (mla_fp8, (1, 2, 70, 1, "block-scaled")),
        (moe, ("small", 3)),
    ],
)
def test_other_rows_have_both_times_xla_and_both_rates(module, shape, timed):
    row = module.measure(shape, None, xla=True)
    unit = result_plot.unit(row)
    assert row[f"xla {unit}"] == row[unit] == pytest.approx(1e-3 / result_plot.TIMES[unit])
    assert row[f"call {unit}"] == 2 * row[unit]
    ones = {"copy_GB_s": 1.0, "read_GB_s": 1.0, "matmul_TFLOP_s": 1.0}
    assert measured_peaks.peak_fractions(row, {"burst": ones})
    assert result_plot.shape(row) == module.label(shape)


def bits(tree):
    return jax.tree.map(lambda x: np.asarray(x).tobytes(), tree)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (mla, mla.SMALL_SHAPES[0]),
        (mla_prefill, (2, 8, 1, 0)),
        (mla_prefill, (1, 8, 1, 8)),
        (gdn_layer_decode, gdn_layer_decode.SMALL_SHAPES[0]),
        (gdn_prefill, gdn_prefill.SMALL_SHAPES[0]),
    ],
)
def test_every_timed_call_has_the_operands_that_were_checked(module, shape, monkeypatch):
    # Ops that compile fast and shrink what they are given.
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1)
    monkeypatch.setattr(gdn, "chunk_gated_delta_rule", lambda v, **_: (v / 2, v))
    monkeypatch.setattr(ops, "causal_attention", lambda q, k, v, **_: (v / 2, v))
    monkeypatch.setattr(ops, "mla_prefill", lambda q, *_, **__: (q / 2, q))
    monkeypatch.setattr(ops, "mla_decode", lambda q, *_, **__: (q / 2, q))
    monkeypatch.setattr(
        gdn_layer_decode,
        "gated_delta_net_decode",
        lambda x, a, b, conv, state, *_, **__: (x, conv, state),
    )
    if module is mla:
        op = mla.decode(mla.inputs(*shape), None, None)
    else:
        op = (module.decode if module is gdn_layer_decode else module.prefill)(shape, None)
    before, seen = bits(op.operands[0]), []

    # The op as each call of the loop sees it.
    def call(operands, state, layer, call=op._call):
        jax.debug.callback(lambda x: seen.append(bits(x)), operands)
        return call(operands, state, layer)

    op._call = call
    jax.block_until_ready(jax.jit(op.loop(1, 3), donate_argnums=1)(op.operands[0], op.state))
    jax.effects_barrier()
    assert len(seen) == 3 and all(each == before for each in seen)
    assert bits(op.operands[0]) == before


def test_states_stay_random_and_of_order_1_for_thousands_of_calls(monkeypatch):
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1)
    op = gdn_layer_decode.decode((1, 1, 2, 1, "float32"), "xla")
    _, drawn = jax.device_get(op.state)
    _, (conv, state) = jax.jit(op.loop(2000, 1), donate_argnums=1)(op.operands[0], op.state)
    assert 0.9 < np.std(state) < 1.1
    assert np.corrcoef(np.ravel(drawn), np.ravel(state))[0, 1] > 0.9
    assert 0.5 < np.std(np.asarray(conv, np.float32)) < 2


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (mla, (2, 20, "1-90", 2)),
        (mla_prefill, (2, 72, 1, 0)),
        (mla_prefill, (1, 24, 2, 70)),
        (gqa_prefill, gqa_prefill.SMALL_SHAPES[0]),
        (gqa_prefill, gqa_prefill.SMALL_SHAPES[1]),
        (gdn_layer_decode, (2, 1, 2, 2, "bfloat16")),
        (gdn_prefill, (1, 2, 2, 70)),
        (gdn_prefill_norm, (1, 2, 2, 70)),
    ],
)
def test_results_are_checked_against_float64(module, shape, monkeypatch):
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1)
    monkeypatch.setattr(gdn_prefill, "CHECKED", 40)  # less than a sequence
    if module is mla:
        op = mla.decode(mla.inputs(*shape), None, "xla")
    else:
        op = (module.decode if module is gdn_layer_decode else module.prefill)(shape, "xla")
    # The norm makes small outputs as large as others, with their errors.
    assert 1e-4 < module.check(op, shape) < (1e-2 if module is gdn_prefill_norm else 5e-3)


def test_a_wrong_result_is_refused(monkeypatch):
    right = ops.causal_attention
    monkeypatch.setattr(ops, "causal_attention", lambda *a, **k: [1.01 * x for x in right(*a, **k)])
    with pytest.raises(AssertionError, match="relative error 0.0"):
        mla_prefill.measure((1, 24, 1, 0), "xla")


@pytest.mark.parametrize(
    "off, words",
    [
        (lambda out, lse: (1.01 * out, lse), "relative error 0.0"),
        (lambda out, lse: (out, 1.001 * lse), "LSE 0.00"),
        (lambda out, lse: (out.at[-1].set(jnp.nan), lse), "relative error nan"),
    ],
)
def test_a_wrong_result_of_decode_is_refused(off, words, monkeypatch):
    right = mla.mla.mla_decode
    monkeypatch.setattr(mla.mla, "mla_decode", lambda *a, **k: off(*right(*a, **k)))
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1)
    shape = (2, 20, "1-90", 2)
    with pytest.raises(AssertionError, match=words):
        mla.check(mla.decode(mla.inputs(*shape), None, "xla"), shape)


@pytest.mark.usefixtures("locations")
@pytest.mark.parametrize("turns, together", [(5, 1), (2, 8)])
def test_calls_in_a_loop_are_neither_merged_nor_dropped_nor_moved_out_of_it(turns, together):
    op = timing.TimedOp(lambda x, state, layer: (jnp.sin(x), state), [jnp.ones((64, 128))])
    text = jax.jit(op.loop(turns, together)).lower(op.operands[0], ()).compile().as_text()
    # Of the computations with a sine, the loop's body is the only caller.
    within = [part for part in text.split("\n\n") if "f32[64,128]{1,0} sine(" in part]
    assert sum(part.count(" sine(") for part in within) == together
    assert all("while/body" in part for part in within)
    assert f'known_trip_count":{{"n":"{turns}"' in text
    assert "f32[64,128]{1,0} copy(" not in text
    ran = []

    def call(x, state, layer):
        jax.debug.callback(lambda layer: ran.append(int(layer)), layer)
        return x, state

    op = timing.TimedOp(call, [jnp.ones(2)], layers=2)
    jax.block_until_ready(jax.jit(op.loop(turns, together))(op.operands[0], ()))
    jax.effects_barrier()
    assert sorted(ran) == sorted([i % 2 for i in range(together)] * turns)


@pytest.mark.parametrize(
    "kernels, layers, together",
    [(8e-6, 1, 32), (8e-6, 32, 32), (8e-6, 11, 33), (130e-6, 2, 8), (130e-6, 5, 10), (2e-3, 1, 1)],
)
def test_a_turn_has_all_layers_equally_often(kernels, layers, together):
    turns, calls = timing.turns_of(kernels, layers)
    assert calls == together
    assert timing.LOOP_SECONDS / 2 <= turns * calls * kernels < timing.LOOP_SECONDS


def test_what_starts_and_ends_a_loop_is_left_out(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def dispatched(times):
        clock[0] += 0.001 + times * 0.025

    more = timing.seconds_more(lambda: dispatched(1), lambda: dispatched(3))
    assert more == pytest.approx(2 * 0.025)


def test_kernels_are_counted_in_the_last_calls_of_a_warm_profile(monkeypatch):
    calls = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def events(run):
        calls.clear()
        run()
        n = len(calls)
        assert n >= 2 * timing.PROFILED and n % timing.PROFILED == 0
        # Two of one kernel a call, slow ones first; and one that ran only once.
        times = [(at, 5000.0 if at < 2 * (n - timing.PROFILED) else 2000.0) for at in range(2 * n)]
        each = [(i, 1000.0) for i in range(n)]
        return {"kernel": times[::-1], "copy": [(0, 7.0)], "other": each, "MemcpyH2D": each}

    monkeypatch.setattr(timing, "gpu_events", events)
    assert timing.kernel_seconds(calls.append, warmup=1e-3) == pytest.approx(5e-6)


def test_the_ceiling_that_binds_is_named_and_is_that_of_a_burst():
    burst = {"copy_GB_s": 3800.0, "read_GB_s": 4000.0, "matmul_TFLOP_s": 800.0}
    facts = {"copy_GB_s": 3900.0, "matmul_TFLOP_s": 600.0, "burst": burst}
    shares = measured_peaks.peak_fractions({"GB/s": 1000.0, "TFLOP/s": 600.0}, facts)
    assert shares == {"of memory": 0.25, "of matmul": 0.75, "% of roof": "75.0% matmul"}
    shares = measured_peaks.peak_fractions({"GB/s": 3000.0, "TFLOP/s": 80.0}, facts)
    assert shares["% of roof"] == "75.0% memory"


def test_ceilings_are_rates():
    assert measured_peaks.copy_bandwidth(1024) > 0
    assert measured_peaks.matmul_rate(32) > 0
    assert min(measured_peaks.burst_peaks(2048, 32).values()) > 0


def test_a_burst_s_ceilings_are_taken_as_a_row_s_time_is(monkeypatch):
    monkeypatch.setattr(measured_peaks, "kernel_seconds", lambda call: call(0).size and 1e-3)
    wanted = {"copy_GB_s": 8192e-6, "read_GB_s": 4096e-6, "matmul_TFLOP_s": 2 * 32**3 * 1e-9}
    assert measured_peaks.burst_peaks(2048, 32) == pytest.approx(wanted)


def test_notes_compare_drawn_lengths_with_even_ones():
    times = {"1,2,even 1-9,1": 10.0, "1,2,1-9,1": 10.5, "1,2,3,1": 1.0}
    (note,) = mla.notes([{"B,H,T,S": name, "us": us} for name, us in times.items()])
    assert note.startswith("1,2,1-9,1: 1.050 of")


def test_notes_compare_fp8_caches_with_bfloat16():
    rows = [
        {"B,H,T,S": name, "cache": cache, "us": us}
        for name, cache, us in (
            ("1,16,9,1", "bfloat16", 3.0), ("1,16,9,1", "e4m3", 2.0), ("1,2,9,1", "e4m3", 1.0)
        )
    ]  # fmt: skip
    (note,) = mla_fp8.notes(rows)
    assert note.startswith("1,16,9,1: e4m3 1.50 times as fast as bfloat16 (wanted")


def test_outside_of_a_checkout_there_are_no_baselines(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "BASELINES", tmp_path / "none")
    monkeypatch.setattr(bench, "baselines", None)
    monkeypatch.setattr(run_metadata, "card", dict)  # which asks programs
    monkeypatch.setattr(run_metadata, "commit", str)
    with pytest.raises(SystemExit, match="2"):
        bench.main(["mla", "--small"])
    assert "baselines need a checkout of the repository" in capsys.readouterr().err
    assert not measured
    assert bench.main(["mla", "--small", "--no-peers"]) == 0
    assert measured == list(mla.SMALL_SHAPES)


def test_a_peer_that_is_not_installed_is_named_and_skipped(measured, monkeypatch, capsys):
    monkeypatch.setattr(torch_runner.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch_runner.subprocess, "run", None)
    monkeypatch.setattr(run_metadata, "card", dict)  # which asks programs
    monkeypatch.setattr(run_metadata, "commit", str)
    assert bench.main(["mla", "--small"]) == 0
    said = capsys.readouterr()
    assert "flashinfer-mla: not installed (python3 -m pip install flashinfer-python torch)" in (
        said.err
    )
    assert "xla us" in said.out and "flashinfer call us" not in said.out
    assert measured == list(mla.SMALL_SHAPES)


def test_an_installed_peer_has_a_column_and_its_failures_are_a_line(
    measured, fake_packages, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(mla, "SMALL_SHAPES", mla.SMALL_SHAPES[1:3])
    # Whether jax-triton is installed here or not.
    peer = jax_triton_baselines.TritonBaseline
    monkeypatch.setattr(peer, "missing", lambda peer: ["jax-triton", "triton"])
    file = tmp_path / "run.json"
    assert bench.main(["mla", "--small", "--json", str(file)]) == 0
    said = capsys.readouterr()
    assert "flashinfer call us" in said.out
    run = json.loads(file.read_text())
    assert [row["cache"] for row in run["rows"] if "cache" in row] == list(mla_fp8.CACHES)
    times = [row["flashinfer call us"] for row in run["rows"] if "cache" not in row]
    assert times == ["", pytest.approx(1000)]
    assert times == [row["flaggems call us"] for row in run["rows"] if "cache" not in row]
    bursts = [row["flaggems us"] for row in run["rows"] if "cache" not in row]
    assert bursts == ["", pytest.approx(700)]
    assert run["peers"] == [
        "flashinfer-mla [1, 20, 130, 2]: ValueError: 20 heads",
        "flashinfer-mla: flashinfer-python 9.9, by CUDA events around a graph",
        "flaggems-mla [1, 20, 130, 2]: ValueError: it supports only one token per row, not 2",
        "flaggems-mla: flag_gems 5.0, by CUDA events around a graph",
        "vllm-flashmla: not installed (python3 -m pip install vllm torch)",
        "flaggems by jax-triton: not installed (python3 -m pip install jax-triton triton)",
    ]


def test_a_peer_by_jax_triton_is_named_with_its_versions(monkeypatch):
    peer = jax_triton_baselines.TritonBaseline
    monkeypatch.setattr(peer, "missing", lambda peer: [])
    packages = {"numpy": "numpy", "no_metadata": "no-such-package"}
    mla_peer = dataclasses.replace(jax_triton_baselines.PEERS["mla"], packages=packages)
    monkeypatch.setitem(jax_triton_baselines.PEERS, "mla", mla_peer)
    said = f"numpy {np.__version__}, no-such-package of an unknown version"
    assert jax_triton_baselines.said("mla") == [f"flaggems by jax-triton: {said}"]


@pytest.mark.parametrize(
    "q_len, cache, batch", [(2, "bfloat16", 1), (9, "uint8", 1), (9, "bfloat16", 2)]
)
def test_flashmlas_lists_are_of_the_shapes_that_it_has(q_len, cache, batch):
    build = torch_runner.PEERS["vllm-flashmla-sparse"].build
    with pytest.raises(
        ValueError, match="decodes only from block-scaled caches, and prefills only one row"
    ):
        build(batch, q_len, 64, 32768, 2048, cache)


def test_a_peer_that_crashes_does_not_stop_the_run(monkeypatch):
    first = json.dumps({"peer": "fla-decode", "shape": [1], "seconds": 2.0, "how": "so",
                        "burst": 1.0, "version": "1"})  # fmt: skip

    def crash(command, **_):
        assert command[-3:] == ["fla-decode", "[1]", "[2]"]
        return subprocess.CompletedProcess(command, -11, f"talk\n{first}\n", "first\nlast\n")

    def hang(command, **_):
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(torch_runner.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(torch_runner.subprocess, "run", crash)
    times, said = torch_runner.measure("gdn_layer_decode", [(1,), (2,)])
    assert times == {"fla": {"[1]": 1.0}, "fla call": {"[1]": 2.0}}
    assert said == ["fla-decode: fla-core 1, by so", "fla-decode: exit code -11: last"]
    monkeypatch.setattr(torch_runner.subprocess, "run", hang)
    times, said = torch_runner.measure("gdn_layer_decode", [(1,)])
    assert times == {} and said == ["fla-decode: took more than 1200 seconds"]


def test_only_the_named_shapes_are_measured_and_an_unknown_one_is_an_error(measured, capsys):
    argv = ["mla", "--small", "--no-peers", "--only"]
    assert bench.main([*argv, "2,16,256,1", "3,16,even 1-200,1"]) == 0
    assert measured == [(2, 16, 256, 1), (3, 16, "even 1-200", 1)]
    with pytest.raises(SystemExit) as stopped:
        bench.main([*argv, "2,16,256,1", "1,2"])
    assert stopped.value.code == 2
    assert "mla has no shape 1,2; its shapes are 2,16,256,1 1,20,130,2" in capsys.readouterr().err


def test_shapes_of_a_gpu_have_names_of_their_own():
    for module in sum(bench.MODULES.values(), []):
        names = bench.known(module, small=False)
        assert len(names) == len(module.SHAPES + module.MORE_SHAPES)


def test_a_run_that_is_cut_short_keeps_its_rows(measured, monkeypatch, tmp_path):
    file, whole = tmp_path / "run.json", mla.measure

    def measure(shape, *args, **kwargs):
        if shape == mla.SMALL_SHAPES[2]:
            assert len(json.loads(file.read_text())["rows"]) == 2
            raise KeyboardInterrupt
        return whole(shape, *args, **kwargs)

    monkeypatch.setattr(mla, "measure", measure)
    assert bench.main(["mla", "--small", "--no-peers", "--json", str(file)]) == 130
    assert len(json.loads(file.read_text())["rows"]) == 2
    assert list(tmp_path.iterdir()) == [file]


def test_a_profile_is_read_where_warnings_are_errors():
    """Without what launches_in says about them the process aborts."""
    program = """
import jax, jax.numpy as jnp
from jaxattn.bench.harness.timing import launches_in, recorded
step = jax.jit(lambda x: jnp.tanh(x @ x))
x = jnp.ones((64, 64))
step(x)
data = recorded(lambda: step(x).block_until_ready())
print(sorted({launch.op for launch in launches_in(data, planes="/host:CPU", lines="")}))
"""
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(ast.literal_eval(done.stdout)) > 1  # instructions, and what is none


def test_without_a_stdout_nothing_is_measured(measured, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(mla, "measure", lambda *args, **kwargs: pytest.fail("it was measured"))
    assert bench.main(["mla", "--small", "--no-peers"]) == 1
    assert "error: stdout is closed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, code, said",
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: No space left on device"),
    ],
)
def test_an_output_that_takes_no_more_ends_without_a_traceback(
    error, code, said, measured, monkeypatch, capsys
):
    class Full(io.StringIO):
        def write(self, text):
            raise error

    monkeypatch.setattr(sys, "stdout", Full())
    assert bench.main(["mla", "--small", "--no-peers"]) == code
    assert said in capsys.readouterr().err


def test_every_peer_runs_a_bench_of_ours_and_names_a_package():
    benches = {
        module.__name__.rpartition(".")[2]: what
        for what, modules in bench.MODULES.items()
        for module in modules
    }
    assert all(peer.package for peer in torch_runner.PEERS.values())
    of_torch = {peer.bench for peer in torch_runner.PEERS.values()}
    assert {benches[name] for name in of_torch | set(jax_triton_baselines.PEERS)} == set(
        bench.COMPARED
    )
    with pytest.raises(ValueError, match="only float32 states, not bfloat16"):
        torch_delta_rule.fla_decode(1, 1, 1, 1, "bfloat16")


def test_what_overlaps_counts_once_in_a_burst():
    assert torch_runner.covered([(0, 4), (2, 6), (3, 5), (8, 9)]) == 7


def test_labels_are_spread_as_little_as_they_need():
    assert result_plot.spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert result_plot.spread([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    assert result_plot.spread([0.2, 1.0, 1.0], 0.1) == pytest.approx([0.2, 0.9, 1.0])


def test_a_run_is_stored_with_a_measurement_per_line(tmp_path):
    rows = [{"B": "1", "us": 2.5, "kernels": [["a", 1.0], ["b", 1.5]]}, {"B": "2", "us": None}]
    kinds = {"decode 1": [{"kind": "attention"}, {"kind": "copy"}], "decode 2": []}
    run = {"what": "some", "method": {"name": "loop", "s": 1}, "rows": rows, "kinds": kinds}
    result_tables.store(run | {"notes": [], "peers": ["FLA", "FA3"]}, tmp_path / "run.json")
    text = (tmp_path / "run.json").read_text()
    assert json.loads(text) == run | {"notes": [], "peers": ["FLA", "FA3"]}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert text.splitlines() == [
        "{",
        ' "what": "some",',
        ' "method": {"name": "loop", "s": 1},',
        ' "rows": [',
        '  {"B": "1", "us": 2.5, "kernels": [["a", 1.0], ["b", 1.5]]},',
        '  {"B": "2", "us": null}',
        " ],",
        ' "kinds": {',
        '  "decode 1": [',
        '   {"kind": "attention"},',
        '   {"kind": "copy"}',
        "  ],",
        '  "decode 2": []',
        " },",
        ' "notes": [],',
        ' "peers": ["FLA", "FA3"]',
        "}",
    ]


def test_a_stored_run_is_drawn_opaque(tmp_path, request):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    file = tmp_path / "mla.png"
    stored = request.config.rootpath / STORED
    assert bench.main(["plot", str(stored), "--plot", str(file)]) == 0
    assert file.stat().st_size < 200_000
    picture = imread(file)
    assert (picture[0, 0] == 1).all() and (picture[..., -1] == 1).all()


def test_a_run_of_gdn_has_bars_of_both_units(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"B,Hk,Hv,S": "1,1,1,1", "us": 5.0, "TFLOP/s": 0.1, "GB/s": 90.0, "fla us": 6.0},
        {"sequences": "1x9", "ms": 2.0, "TFLOP/s": 3.0, "GB/s": 9.0, "fla ms": "", "xla ms": 9.0},
    ]
    result_plot.save({"what": "gdn", "rows": rows}, tmp_path / "gdn.png")
    assert (tmp_path / "gdn.png").exists()
    assert [list(result_plot.times(row, ["fla", "xla"])) for row in rows] == [
        [("jaxattn", 5.0), ("fla", 6.0)],
        [("jaxattn", 2.0), ("xla", 9.0)],
    ]


def test_what_cannot_be_drawn_is_said(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run.json"
    run.write_text('{"rows": [{"model": "tiny"}]}')
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert bench.main(["plot", str(run), "--plot", "x.png"]) == 2
    assert "--plot needs matplotlib: install jaxattn[plot]" in capsys.readouterr().err
    with pytest.raises(result_plot.BenchPlotError, match="matplotlib"):
        result_plot.save(json.loads(run.read_text()), tmp_path / "x.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    with pytest.raises(result_plot.BenchPlotError, match="no rows with TFLOP/s"):
        result_plot.save(json.loads(run.read_text()), tmp_path / "x.png")
    assert bench.main(["plot", str(tmp_path / "none.json"), "--plot", "x.png"]) == 2
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing"], "no bench 'nothing'; the benches are mla, mla-prefill,"),
        (
            ["nothing"],
            "parallel, collectives, long-row, compare, dense, host, quality, offline, serve",
        ),
        (["plot", "x.json"], "--plot FILE.png"),
        (["plot", "--plot", "x.png"], "RUN.json"),
        (["mla", "x.json"], "RUN.json"),
        (["step", "--plot", "x.png"], "mla, mla-prefill and gdn"),
        (["step", "--small", "--json", "/nowhere/x.json"], "/nowhere/x.json: cannot be written"),
        (["gdn", "--small", "--plot", "/nowhere/x.png"], "/nowhere/x.png: cannot be written"),
        pytest.param(
            ["mla", "--small", "--implementation", "mosaic_gpu"],
            "needs a Hopper GPU",
            marks=pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU"),
        ),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(argv, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(argv)
    assert message in capsys.readouterr().err


def test_the_step_says_which_leaf_its_loop_copies():
    copy = BufferCopy("params.w_uk", 1_048_576, 16_777_216, "while.1", "copy.2", "")
    report = AliasingReport(1, 1, None, (copy,))
    assert decode_step.copied_in_loop(report) == "params.w_uk: 1,048,576 bytes"
    assert decode_step.copied_in_loop(AliasingReport(1, 1, None, ())) == "none"
