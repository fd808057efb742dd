"""`bench train` counts both passes apart and checks gradients; no times."""

import argparse
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxattn.bench import __main__ as bench
from jaxattn.bench.baselines import torch_layers, torch_runner
from jaxattn.bench.layers.gradients import gradient_timing, layer_gradients, op_gradients


@pytest.fixture
def timed(monkeypatch):
    """The forward pass takes 1 ms, and both passes, which have a cotangent, 3."""
    monkeypatch.setattr(
        gradient_timing.CompiledPass,
        "loop_seconds",
        lambda each: 3e-3 if len(each.operands) == 3 else 1e-3,
    )


def test_an_op_s_row_has_both_passes_and_the_error_of_its_gradients(timed):
    row = op_gradients.measure(op_gradients.SMALL_SHAPES[0], None)
    assert {unit: row[unit] for unit in ("ms", "forward ms", "backward ms")} == pytest.approx(
        {"ms": 3.0, "forward ms": 1.0, "backward ms": 2.0}
    )
    assert row["TFLOP/s"] == pytest.approx(3 * 24 * 2 * 6 * 64 * 64 / 3e-3 / 1e12)
    assert 0 < row["relative L2"] < 2e-2 and row["MiB"] > row["forward MiB"]


def test_a_wrong_gradient_is_refused(monkeypatch):
    monkeypatch.setattr(op_gradients, "check", lambda *_: 0.5)
    with pytest.raises(AssertionError, match="gradients differ by 0.5"):
        op_gradients.measure(op_gradients.SMALL_SHAPES[0], None)


def test_a_layer_s_row_has_both_passes(timed):
    row = layer_gradients.measure(layer_gradients.SMALL_SHAPES[0], None)
    assert row["backward ms"] == pytest.approx(2.0) and row["relative L2"] < 2e-2
    assert row["TFLOP/s"] == pytest.approx(6 * 3 * 64 * 64 * 24 / 3e-3 / 1e12)


@pytest.mark.parametrize("name", ["mla", "gqa", "gdn", "kda", "experts"])
def test_an_op_takes_its_operands_as_jit_hands_them_on(name):
    op = op_gradients.OPS[name]()
    operands = jax.eval_shape(lambda: (op.floats(2, 8), op.fixed(2, 8)))
    out = jax.eval_shape(lambda *operands: op.call(*operands, "xla"), *operands)
    assert out.size == operands[0][{"gqa": "q", "experts": "x"}.get(name, "v")].size


def test_of_a_stack_a_token_meets_the_experts_that_it_takes():
    assert layer_gradients.met_by_a_token(jnp.zeros((18, 4, 2))) == 18 * 4 * 2 / 2
    assert layer_gradients.met_by_a_token(jnp.zeros((4, 2))) == 8
    assert layer_gradients.met_by_a_token(jnp.zeros(4)) == 0


def test_a_peer_that_fails_is_a_line_and_no_column(capsys):
    def refuse(floats, fixed):
        raise ValueError("heads of 192\nare too wide")

    columns = op_gradients.peer_columns("cudnn", refuse, ({}, {}, jnp.zeros(())))
    assert not dict(columns)
    assert capsys.readouterr().err == "cudnn: ValueError: heads of 192\n"


def test_without_xla_the_peers_in_jax_are_there():
    ops = types.SimpleNamespace(
        SHAPES=(("gqa", 1, 8),),
        measure=lambda shape, implementation, *, xla: {
            "ms": 1.0,
            **({"xla ms": 9.0} if xla else {}),
        },
        measure_peers=lambda shape: {"cudnn ms": 2.0},
        __name__="op_gradients",
    )
    given: dict[str, Any] = {"what": "train", "only": None, "all": False, "small": False}
    given |= {"implementation": None, "kv_cache_dtype": "auto", "no_peers": False, "no_xla": True}
    args = argparse.Namespace(**given)
    assert list(bench.measure(ops, args, {}, {})) == [{"ms": 1.0, "cudnn ms": 2.0}]
    args.no_peers = True
    assert list(bench.measure(ops, args, {}, {})) == [{"ms": 1.0}]


def test_an_implementation_is_not_for_layers(capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.main(["train", "--small", "--no-peers", "--implementation", "xla"])
    assert "the layers that it times choose their own implementation" in capsys.readouterr().err


def test_a_peer_s_forward_pass_is_a_column_and_its_memory_a_line(monkeypatch):
    shape = ["hybrid layer", 1, 8192]
    line = {"shape": shape, "burst": 9e-3, "seconds": 1e-2, "forward": 3e-3, "MiB": 2000.4,
            "version": "0.6.0", "how": "CUDA events"}  # fmt: skip
    found = lambda name: name if name == "fla" else None  # noqa: E731
    monkeypatch.setattr(torch_runner.importlib.util, "find_spec", found)
    monkeypatch.setattr(torch_runner, "_run", lambda name, shapes: iter([line]))
    times, said = torch_runner.measure("layer_gradients", [shape])
    assert {who: list(of.values()) for who, of in times.items()} == {
        "torch (fla)": [9e-3], "torch (fla) call": [1e-2], "torch (fla) forward": [3e-3],
    }  # fmt: skip
    assert said == [
        f"torch-layer-gradient {shape}: 2000 MiB in addition to its operands",
        "torch-layer-gradient: flash-linear-attention 0.6.0, by CUDA events",
        "flashqla-layer-gradient: not installed (python3 -m pip install flash-qla torch)",
    ]


def test_no_two_peers_of_a_bench_share_a_column():
    """The times of the second would replace those of the first."""
    columns = [(peer.bench, peer.column) for peer in torch_runner.PEERS.values()]
    assert len(set(columns)) == len(columns)


def test_a_layer_that_pytorch_has_not_is_named():
    with pytest.raises(ValueError, match="it does not support latent attention"):
        torch_layers.layer_gradient("latent attention", 1, 8)
