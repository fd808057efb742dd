"""Other packages' kernels in our process: named where they are missing, refused where they err."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn
from jaxattn.bench import mla, timing, triton_peers
from jaxattn.ops.mla.decode import mla_decode

SHAPE = (2, 1, 2, 1, "float32")
LATENT = (2, 3, 70, 1)


def xla(factor=1.0):
    def call(*operands):
        *given, state = operands
        out, after = gdn.recurrent_gated_delta_rule(
            *given, initial_state=state, output_final_state=True, use_qk_l2norm=True
        )
        return out, after * factor

    return call


def xla_latent(factor=1.0):
    def call(given, layer):
        out, _ = mla_decode(*given, scale=mla.SCALE, layer=layer, implementation="xla")
        return out[:, 0] * jnp.asarray(factor, out.dtype)

    return call


@pytest.fixture
def small(monkeypatch):
    """As on a GPU with all packages, and with one set of inputs."""
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1)
    monkeypatch.setattr(triton_peers.Peer, "missing", lambda self: [])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing.Op, "time", lambda self: 3e-6)


@pytest.mark.parametrize(
    "bench, shape, kernel, stand_in",
    [
        ("gdn_decode", SHAPE, "step_states", xla),
        ("mla", LATENT, "attend", xla_latent),
    ],
)
def test_a_right_kernel_has_a_time_and_a_wrong_one_is_refused(
    bench, shape, kernel, stand_in, small, monkeypatch
):
    column = triton_peers.PEERS[bench].column
    monkeypatch.setattr(triton_peers, kernel, stand_in())
    assert triton_peers.times(bench, shape) == {column: pytest.approx(3)}
    monkeypatch.setattr(triton_peers, kernel, stand_in(1.05))
    with pytest.raises(AssertionError, match="relative error 0.0"):
        triton_peers.times(bench, shape)


@pytest.mark.parametrize("bench, shape", [("gdn_decode", SHAPE), ("mla", LATENT)])
def test_scalars_are_float32_and_integers(bench, shape, small, monkeypatch):
    """jax-triton takes a float for fp64: the kernel's products would be, or do not compile."""
    calls = []

    class Module:
        def __getattr__(self, name):
            return None

        @staticmethod
        def triton_call(*args, out_shape, **options):
            calls.append(args)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape)

    monkeypatch.setattr(triton_peers.importlib, "import_module", lambda name: Module())
    triton_peers.PEERS[bench].op(shape)(0)
    scalars = [x for args in calls for x in args if not isinstance(x, jax.Array)]
    assert scalars
    assert all(isinstance(x, (np.float32, int)) for x in scalars)


def test_other_shapes_and_other_benches_have_no_time(small):
    for bench, shape in (("gdn_decode", (*SHAPE[:4], "bfloat16")), ("mla", (2, 3, 70, 2))):
        assert triton_peers.times(bench, shape) == {triton_peers.PEERS[bench].column: ""}
    assert triton_peers.times("mla_fp8", SHAPE) == {}
    assert triton_peers.said("mla_fp8") == []


def test_a_missing_package_is_named_and_nothing_runs(monkeypatch):
    packages = {"jax": "jax", "no_such_module": "some-package"}
    peer = dataclasses.replace(triton_peers.PEERS["mla"], packages=packages)
    monkeypatch.setitem(triton_peers.PEERS, "mla", peer)
    [line] = triton_peers.said("mla")
    assert line.endswith("not installed (python3 -m pip install some-package)")
    assert triton_peers.times("mla", LATENT) == {}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "bench, shapes",
    [
        ("gdn_decode", [(3, 2, 4, 1), (3, 2, 4, 4)]),
        ("mla", [(3, 20, 130, 1), (2, 128, 300, 1)]),
    ],
)
def test_it_is_right_on_a_gpu(bench, shapes):
    peer = triton_peers.PEERS[bench]
    if lacking := peer.missing():
        pytest.skip(f"not installed: {', '.join(lacking)}")
    for shape in shapes:
        assert peer.error(peer.op(shape)) < 1e-2
