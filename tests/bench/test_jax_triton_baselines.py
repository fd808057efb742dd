"""Other packages' kernels in our process: named where they are missing, refused where they err."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxattn import gdn
from jaxattn.bench.attention import mla, turboquant
from jaxattn.bench.baselines import jax_triton_baselines, vllm_turboquant
from jaxattn.bench.harness import timing
from jaxattn.core.cache.formats import TURBOQUANT
from jaxattn.core.turboquant.codec import E4M3
from jaxattn.ops.mla.decode import mla_decode
from jaxattn.ops.turboquant.vllm_import import stored_codes

pytestmark = pytest.mark.filterwarnings("ignore:the cache format:UserWarning")
LEVELS = np.linspace(-0.3, 0.3, 16, dtype=np.float32)
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


def stored(form, cache, k, v, slots, table):
    """Any codes, and numbers that float16 has, in place of vLLM's store."""
    page = cache.shape[1]
    some = jax.random.bits(jax.random.key(slots.size), (len(k), k.shape[1], form.slot_bytes))
    some = (some & 0x37).astype(jnp.uint8)  # as float16 from 3e-5 to 0.5
    return cache.at[slots // page, slots % page].set(some)


def xla_codes(factor=1.0):
    def call(shape, shared, cache, table, turn):
        rows = cache[shared["block_tables"]]
        rows = rows.reshape(shape.batch, -1, *rows.shape[3:])[:, : shape.tokens]
        codes, form = stored_codes(rows, shape.form), shape.form
        values = codes.minimum[..., None] + codes.scale[..., None] * codes.values.astype(
            jnp.float32
        )
        if form.rotated:
            keys = table[codes.keys]
            keys *= codes.norm[..., None] / jnp.linalg.norm(keys, axis=-1, keepdims=True)
            keys = keys @ turn
        else:
            keys = lax.bitcast_convert_type(codes.keys, E4M3).astype(jnp.float32)
        q = shared["q"][:, 0].reshape(shape.batch, shape.kv_heads, -1, shape.dim)
        scores = jnp.einsum("bhgd,bthd->bhgt", q, keys) * shape.dim**-0.5
        out = jnp.einsum("bhgt,bthd->bhgd", jax.nn.softmax(scores), values) * factor
        return out.reshape(shape.batch, shape.heads, shape.dim)

    return call


@pytest.mark.sampled
@pytest.mark.parametrize("preset", TURBOQUANT)
def test_a_right_decode_of_codes_has_a_time_and_a_wrong_one_is_refused(preset, small, monkeypatch):
    shape = turboquant.TurboquantDecodeShape(2, 4, 2, 64, 70, preset)
    columns = jax_triton_baselines.PEERS["turboquant"].columns
    monkeypatch.setattr(vllm_turboquant, "levels", lambda form: LEVELS[: 2**form.key_bits])
    monkeypatch.setattr(vllm_turboquant, "store", stored)
    monkeypatch.setattr(vllm_turboquant, "attend", xla_codes())
    found = jax_triton_baselines.times("turboquant", shape)
    assert list(found) == columns and list(found.values()) == [pytest.approx(3), pytest.approx(4)]
    monkeypatch.setattr(vllm_turboquant, "attend", xla_codes(1.05))
    with pytest.raises(AssertionError, match="relative error 0.0"):
        jax_triton_baselines.times("turboquant", shape)


@pytest.fixture
def small(monkeypatch):
    """As on a GPU with all packages, and with one set of inputs."""
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1)
    monkeypatch.setattr(jax_triton_baselines.TritonBaseline, "missing", lambda self: [])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing.TimedOp, "time", lambda self: 3e-6)
    monkeypatch.setattr(timing.TimedOp, "times", lambda self: (3e-6, 4e-6))


@pytest.mark.parametrize(
    "bench, shape, kernel, stand_in",
    [
        ("gdn_layer_decode", SHAPE, "step_states", xla),
        ("mla", LATENT, "attend", xla_latent),
    ],
)
def test_a_right_kernel_has_a_time_and_a_wrong_one_is_refused(
    bench, shape, kernel, stand_in, small, monkeypatch
):
    (column,) = jax_triton_baselines.PEERS[bench].columns
    monkeypatch.setattr(jax_triton_baselines, kernel, stand_in())
    assert jax_triton_baselines.times(bench, shape) == {column: pytest.approx(3)}
    monkeypatch.setattr(jax_triton_baselines, kernel, stand_in(1.05))
    with pytest.raises(AssertionError, match="relative error 0.0"):
        jax_triton_baselines.times(bench, shape)


@pytest.mark.parametrize("bench, shape", [("gdn_layer_decode", SHAPE), ("mla", LATENT)])
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

    monkeypatch.setattr(jax_triton_baselines.importlib, "import_module", lambda name: Module())
    jax_triton_baselines.PEERS[bench].op(shape)(0)
    scalars = [x for args in calls for x in args if not isinstance(x, jax.Array)]
    assert scalars
    assert all(isinstance(x, (np.float32, int)) for x in scalars)


def test_other_shapes_and_other_benches_have_no_time(small):
    for bench, shape in (("gdn_layer_decode", (*SHAPE[:4], "bfloat16")), ("mla", (2, 3, 70, 2))):
        assert jax_triton_baselines.times(bench, shape) == dict.fromkeys(
            jax_triton_baselines.PEERS[bench].columns, ""
        )
    assert jax_triton_baselines.times("mla_fp8", SHAPE) == {}
    assert jax_triton_baselines.said("mla_fp8") == []


def test_a_missing_package_is_named_and_nothing_runs(monkeypatch):
    packages = {"jax": "jax", "no_such_module": "some-package"}
    peer = dataclasses.replace(jax_triton_baselines.PEERS["mla"], packages=packages)
    monkeypatch.setitem(jax_triton_baselines.PEERS, "mla", peer)
    [line] = jax_triton_baselines.said("mla")
    assert line.endswith("not installed (python3 -m pip install some-package)")
    assert jax_triton_baselines.times("mla", LATENT) == {}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "bench, shapes",
    [
        ("gdn_layer_decode", [(3, 2, 4, 1), (3, 2, 4, 4)]),
        ("mla", [(3, 20, 130, 1), (2, 128, 300, 1)]),
        (
            "turboquant",
            [turboquant.TurboquantDecodeShape(2, 8, 2, 128, 130, preset) for preset in TURBOQUANT],
        ),
    ],
)
def test_it_is_right_on_a_gpu(bench, shapes):
    peer = jax_triton_baselines.PEERS[bench]
    if lacking := peer.missing():
        pytest.skip(f"not installed: {', '.join(lacking)}")
    for shape in shapes:
        assert peer.error(peer.op(shape)) < 1e-2
