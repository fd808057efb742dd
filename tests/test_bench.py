"""The benchmark's counting, its peers in processes of their own, and its pictures; no times."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.aliasing import AliasingReport, Copy
from jaxattn.bench import __main__ as bench
from jaxattn.bench import (
    gdn_decode,
    gdn_prefill,
    mla,
    mla_fp8,
    mla_prefill,
    peers,
    plot,
    step,
    timing,
)

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
class Event:
    def __init__(self, enable_timing): pass
    def record(self): pass
    def elapsed_time(self, end): return 32.0
cuda = types.SimpleNamespace(
    synchronize=lambda: None, Event=Event, graph=lambda graph: contextlib.nullcontext(),
    CUDAGraph=lambda: types.SimpleNamespace(replay=lambda: None),
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


@pytest.fixture
def fake_flashinfer(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("__version__ = '9.9'")
    (tmp_path / "flashinfer" / "mla.py").write_text(FAKE_FLASHINFER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


@pytest.fixture
def timed(monkeypatch):
    """Nothing is compiled: what would be is traced, gives ones, and takes a millisecond."""

    def jit(op):
        return lambda *args, **kwargs: jax.tree.map(
            lambda x: np.ones(x.shape, x.dtype), jax.eval_shape(op, *args, **kwargs)
        )

    def per_call(op, carry, *, calls=16):
        out = jax.eval_shape(op, carry, jnp.int32(0))
        assert jax.tree.structure(out) == jax.tree.structure(carry)
        shapes = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, out, carry)
        assert all(jax.tree.leaves(shapes))
        return 1e-3

    for module in (mla, mla_prefill, gdn_decode, gdn_prefill):
        monkeypatch.setattr(module, "per_call", per_call)

    def ones(key, shape, dtype=jnp.float32, **_):
        return np.ones(shape, dtype)

    monkeypatch.setattr(jax, "jit", jit)
    monkeypatch.setattr(jax.random, "normal", ones)
    monkeypatch.setattr(jax.random, "uniform", ones)
    monkeypatch.setattr(jax.random, "permutation", lambda key, count: np.arange(count))
    monkeypatch.setattr(jax.random, "split", lambda key, count: [None] * count)
    monkeypatch.setattr(gdn_decode, "inputs", gdn_decode.inputs.__wrapped__)


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


def test_mla_counts_flops_and_bytes_from_the_lengths(timed, monkeypatch):
    of_kernels = iter([{"mla_decode": 2e-3, "mla_decode_combine": 1e-3, "fusion": 1.0},
                       {"mla_decode": 4e-3}])  # fmt: skip
    monkeypatch.setattr(mla, "profile", lambda run: (next(of_kernels), 0.0))
    row = mla.measure((3, 2, "1-70", 1), None, xla=True)
    assert row["us"] == pytest.approx(300)  # of ten calls
    assert row["invariant us"] == pytest.approx(400)
    assert row["call us"] == row["xla us"] == pytest.approx(1000)
    lens = [int(n) for n in mla.lengths(3, "1-70")]
    flops = sum(2 * n * 2 * (576 + 512) for n in lens)
    moved = sum(n * 576 * 2 + 2 * (576 + 512) * 2 for n in lens)
    assert row["TFLOP/s"] == pytest.approx(flops / 300e-6 / 1e12)
    assert row["GB/s"] == pytest.approx(moved / 300e-6 / 1e9)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (gdn_decode, (1, 1, 1, 1, "float32")),
        (gdn_prefill, (1, 1, 2, 3)),
        (mla_prefill, (1, 8, 1, 0)),
        (mla_prefill, (1, 8, 1, 8)),
        (mla_fp8, (1, 2, 70, 1, "e4m3")),
        (mla_fp8, (1, 2, 70, 1, "block-scaled")),
    ],
)
def test_other_rows_have_xla_and_both_rates(module, shape, timed):
    row = module.measure(shape, None, xla=True)
    unit = plot.unit(row)
    assert row[f"xla {unit}"] == row[unit] == pytest.approx(1e-3 / plot.TIMES[unit])
    assert timing.of_ceilings(row, {"copy_GB_s": 1.0, "matmul_TFLOP_s": 1.0})
    assert plot.name(row)


def test_the_ceiling_that_binds_is_named():
    facts = {"copy_GB_s": 4000.0, "matmul_TFLOP_s": 600.0}
    shares = timing.of_ceilings({"GB/s": 1000.0, "TFLOP/s": 450.0}, facts)
    assert shares == {"of copy": 0.25, "of matmul": 0.75, "% of roof": "75.0% matmul"}
    shares = timing.of_ceilings({"GB/s": 3000.0, "TFLOP/s": 60.0}, facts)
    assert shares["% of roof"] == "75.0% copy"


def test_ceilings_are_rates():
    assert timing.copy_bandwidth(1024) > 0
    assert timing.matmul_rate(32) > 0


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


def test_a_peer_that_is_not_installed_is_named_and_skipped(measured, monkeypatch, capsys):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(peers.subprocess, "run", None)
    assert bench.main(["mla", "--small"]) == 0
    said = capsys.readouterr()
    assert "flashinfer-mla: not installed (python3 -m pip install flashinfer-python torch)" in (
        said.err
    )
    assert "xla us" in said.out and "flashinfer us" not in said.out
    assert measured == list(mla.SMALL_SHAPES)


def test_an_installed_peer_has_a_column_and_its_failures_are_a_line(
    measured, fake_flashinfer, tmp_path, capsys
):
    file = tmp_path / "run.json"
    assert bench.main(["mla", "--small", "--json", str(file)]) == 0
    said = capsys.readouterr()
    assert "flashinfer us" in said.out
    run = json.loads(file.read_text())
    assert [row["cache"] for row in run["rows"] if "cache" in row] == list(mla_fp8.CACHES)
    times = [row["flashinfer us"] for row in run["rows"] if "cache" not in row]
    assert times == [pytest.approx(1000), "", pytest.approx(1000), pytest.approx(1000)]
    assert run["peers"] == [
        "flashinfer-mla: flashinfer-python 9.9, by CUDA events around a graph",
        "flashinfer-mla [1, 20, 130, 2]: ValueError: 20 heads",
    ]


def test_a_peer_that_crashes_does_not_stop_the_run(monkeypatch):
    first = json.dumps({"peer": "fla-decode", "shape": [1], "seconds": 2.0, "how": "so",
                        "version": "1"})  # fmt: skip

    def crash(command, **_):
        assert command[-3:] == ["fla-decode", "[1]", "[2]"]
        return subprocess.CompletedProcess(command, -11, f"talk\n{first}\n", "first\nlast\n")

    def hang(command, **_):
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(peers.subprocess, "run", crash)
    times, said = peers.measure("gdn_decode", [(1,), (2,)])
    assert times == {"fla": {"[1]": 2.0}}
    assert said == ["fla-decode: fla-core 1, by so", "fla-decode: exit code -11: last"]
    monkeypatch.setattr(peers.subprocess, "run", hang)
    times, said = peers.measure("gdn_decode", [(1,)])
    assert times == {} and said == ["fla-decode: took more than 1200 seconds"]


def test_every_peer_runs_a_bench_of_ours_and_names_a_package():
    benches = {module.__name__.rpartition(".")[2] for each in bench.MODULES.values()
               for module in each}  # fmt: skip
    assert all(peer.bench in benches and peer.package for peer in peers.PEERS.values())
    with pytest.raises(ValueError, match="float32, not bfloat16"):
        peers.fla_decode(1, 1, 1, 1, "bfloat16")


def test_labels_are_spread_as_little_as_they_need():
    assert plot.spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert plot.spread([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    assert plot.spread([0.2, 1.0, 1.0], 0.1) == pytest.approx([0.2, 0.9, 1.0])


def test_a_stored_run_is_drawn_opaque(tmp_path, request):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    file = tmp_path / "mla.png"
    stored = request.config.rootpath / STORED
    assert bench.main(["plot", str(stored), "--plot", str(file)]) == 0
    assert file.stat().st_size < 100_000
    picture = imread(file)
    assert (picture[0, 0] == 1).all() and (picture[..., -1] == 1).all()


def test_a_run_of_gdn_has_bars_of_both_units(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"B,Hk,Hv,S": "1,1,1,1", "us": 5.0, "TFLOP/s": 0.1, "GB/s": 90.0, "fla us": 6.0},
        {"sequences": "1x9", "ms": 2.0, "TFLOP/s": 3.0, "GB/s": 9.0, "fla ms": "", "xla ms": 9.0},
    ]
    plot.save({"what": "gdn", "rows": rows}, tmp_path / "gdn.png")
    assert (tmp_path / "gdn.png").exists()
    assert [list(plot.times(row, ["fla", "xla"])) for row in rows] == [
        [("jaxattn", 5.0), ("fla", 6.0)],
        [("jaxattn", 2.0), ("xla", 9.0)],
    ]


def test_what_cannot_be_drawn_is_said(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run.json"
    run.write_text('{"rows": [{"model": "tiny"}]}')
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert bench.main(["plot", str(run), "--plot", "x.png"]) == 2
    assert "--plot needs matplotlib: install jaxattn[plot]" in capsys.readouterr().err
    with pytest.raises(plot.PlotError, match="matplotlib"):
        plot.save(json.loads(run.read_text()), tmp_path / "x.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    with pytest.raises(plot.PlotError, match="no rows with TFLOP/s"):
        plot.save(json.loads(run.read_text()), tmp_path / "x.png")
    assert bench.main(["plot", str(tmp_path / "none.json"), "--plot", "x.png"]) == 2
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plot", "x.json"], "--plot FILE.png"),
        (["plot", "--plot", "x.png"], "RUN.json"),
        (["mla", "x.json"], "RUN.json"),
        (["step", "--plot", "x.png"], "mla, mla-prefill and gdn"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(argv, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(argv)
    assert message in capsys.readouterr().err


def test_the_step_says_which_leaf_its_loop_copies():
    copy = Copy("params.w_uk", 1_048_576, 16_777_216, "while.1", "copy.2", "")
    report = AliasingReport(1, 1, None, (copy,))
    assert step.copied_in_loop(report) == "params.w_uk: 1,048,576 bytes"
    assert step.copied_in_loop(AliasingReport(1, 1, None, ())) == "none"
