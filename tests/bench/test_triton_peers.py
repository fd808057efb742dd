"""Other packages' kernels in our process: named where they are missing, refused where they err."""

import jax
import pytest

from jaxattn import gdn
from jaxattn.bench import timing, triton_peers

SHAPE = (2, 1, 2, 1, "float32")


def xla(factor=1.0):
    def call(*operands):
        *given, state = operands
        out, after = gdn.recurrent_gated_delta_rule(
            *given, initial_state=state, output_final_state=True, use_qk_l2norm=True
        )
        return out, after * factor

    return call


@pytest.fixture
def small(monkeypatch):
    """As on a GPU with all packages, and with one set of inputs."""
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1)
    monkeypatch.setattr(triton_peers, "missing", lambda: [])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing.Op, "time", lambda self: 3e-6)


def test_a_right_kernel_has_a_time_and_a_wrong_one_is_refused(small, monkeypatch):
    monkeypatch.setattr(triton_peers, "call", xla())
    assert triton_peers.times("gdn_decode", SHAPE) == {triton_peers.COLUMN: pytest.approx(3)}
    monkeypatch.setattr(triton_peers, "call", xla(1.05))
    with pytest.raises(AssertionError, match="relative error 0.0"):
        triton_peers.times("gdn_decode", SHAPE)


def test_other_states_and_other_benches_have_no_time(small):
    assert triton_peers.times("gdn_decode", (*SHAPE[:4], "bfloat16")) == {triton_peers.COLUMN: ""}
    assert triton_peers.times("mla", SHAPE) == {}
    assert triton_peers.said("mla") == []


def test_a_missing_package_is_named_and_nothing_runs(monkeypatch):
    monkeypatch.setattr(triton_peers, "PACKAGES", {"jax": "jax", "no_such_module": "some-package"})
    [line] = triton_peers.said("gdn_decode")
    assert line.endswith("not installed (python3 -m pip install some-package)")
    assert triton_peers.times("gdn_decode", SHAPE) == {}


@pytest.mark.gpu
def test_fla_s_recurrence_is_right_on_a_gpu():
    if lacking := triton_peers.missing():
        pytest.skip(f"not installed: {', '.join(lacking)}")
    for tokens in (1, 4):
        assert triton_peers.check(triton_peers.recurrence(3, 2, 4, tokens)) < 1e-2
