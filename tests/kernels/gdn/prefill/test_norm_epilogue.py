"""The gated norm of prefill's output, by the kernel on its way out and by XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.numerics.rms_norm import gated_rms_norm
from jaxattn.kernels.gdn.prefill.inter_chunk import launch as gdn_prefill_state
from jaxattn.kernels.gdn.prefill.inter_chunk import norm_epilogue as gdn_prefill_norm
from jaxattn.ops.gdn.prefill import gated_delta_rule_prefill
from jaxattn.ops.gdn.prefill_options import OutputNorm
from tests.helpers.gdn_prefill_cases import BOUND, make_case, on_a_pool, oracle
from tests.helpers.kernel_cases import both_devices, no_races, relative, slow, slow_interpreted

EPS = 1e-3  # so that it counts where outputs are small


def gated_case(lens, reads, *, key_heads=1, value_heads=2, dtype=jnp.bfloat16, columns=40):
    """(a PoolCase, its arguments with a gate): z behind `columns` of NaN, and NaN wherever the
    token belongs to no live sequence."""
    case = make_case(lens, key_heads=key_heads, value_heads=value_heads, dtype=dtype)
    pooled = on_a_pool(case, reads, reads, [[-1]] * len(lens), num_slots=len(lens) + 1)
    rng, tokens = np.random.default_rng(7), case.v.shape[1]
    gate = rng.normal(scale=3.0, size=(1, tokens, columns + 128 * value_heads))
    gate[..., :columns] = np.nan
    gate[:, ~pooled.live] = np.nan
    arguments = pooled.arguments | {
        "output_norm": OutputNorm(
            gate=jnp.asarray(gate.astype(dtype)),
            weight=jnp.asarray(rng.normal(size=128).astype(np.float32)),
            eps=EPS,
        )
    }
    del arguments["checkpoints"]
    return pooled, arguments


def expected(pooled, arguments):
    """Of the live tokens [t, Hv, 128], in float64."""
    o = oracle(pooled.case)[0][0]
    norm = arguments["output_norm"]
    z = np.asarray(norm.gate, np.float64)[0, : len(o), -o.shape[1] * 128 :]
    z, weight = z.reshape(o.shape), np.asarray(norm.weight, np.float64)
    silu = z * (1 + np.tanh(z / 2)) / 2
    y = o / np.sqrt((o * o).mean(axis=-1, keepdims=True) + EPS) * weight * silu
    return y[pooled.live[: len(o)]]


@functools.partial(jax.jit, static_argnames=("implementation", "split_tokens"))
def step(**arguments):
    return gated_delta_rule_prefill(**arguments)


def run(arguments, implementation):
    step.clear_cache()  # of what was traced with another number of multiprocessors
    return step(**arguments, implementation=implementation)


def without_norm(arguments):
    return {name: x for name, x in arguments.items() if name != "output_norm"}


def with_norm(arguments, **changes):
    return {"output_norm": dataclasses.replace(arguments["output_norm"], **changes)}


@pytest.fixture
def begun(monkeypatch):
    """Grows where a kernel norms."""
    calls, right = [], gdn_prefill_norm.GatedNormEpilogue.begin

    def begin(norm):
        calls.append(norm)
        right(norm)

    monkeypatch.setattr(gdn_prefill_norm.GatedNormEpilogue, "begin", begin)
    return calls


def assert_normed(pooled, arguments, out):
    tokens = pooled.live
    assert relative(out[0, tokens], expected(pooled, arguments)) < BOUND
    assert (np.asarray(out, np.float32)[0, ~tokens] == 0).all()


@pytest.mark.slow_cases(
    reason="halves in blocks of their own that XLA does not norm; found by a gate of another "
    "dtype, normed by XLA too"
)
@slow_interpreted(
    "a norm of another run; found by race detection of the norm, whose block has all runs, too"
)
@pytest.mark.parametrize("inside", [True, slow(False)])
def test_gated_norm_of_packed_sequences_before_nan(inside, implementation, begun, monkeypatch):
    """Few blocks, which go from one run to another, with and without a tail or a token; and with
    each half of a state in a block of its own, where XLA norms."""
    monkeypatch.setattr(gdn_prefill_state, "NUM_SMS", 3 if inside else 132)
    pooled, arguments = gated_case([1, 64, 20, 0, 65], [0, 1, -1, 2, 3])
    out, states = run(arguments, implementation)
    assert bool(begun) == inside
    assert_normed(pooled, arguments, out)
    final = oracle(pooled.case)[1]
    for sequence, slot in enumerate(pooled.reads):
        assert slot < 0 or relative(states[1, slot], final[sequence]) < BOUND
    if implementation == "mosaic_gpu":
        np.testing.assert_array_equal(states, run(without_norm(arguments), implementation)[1])


@both_devices
@pytest.mark.slow(
    reason="a sigmoid that overflows; found by float16 in test_float16 and the norm of packed "
    "sequences too"
)
def test_gated_norm_of_float16_and_of_gates_of_any_size(implementation, monkeypatch):
    monkeypatch.setattr(gdn_prefill_state, "NUM_SMS", 3)
    pooled, arguments = gated_case([70], [0], dtype=jnp.float16)
    gate = np.array(arguments["output_norm"].gate)
    sizes = np.array([0, -0.0, 6e-8, -30, -100, -3e4, 20, 100, 1000, 3000])
    gate[0, : len(sizes), -128:] = sizes[:, None]
    arguments |= with_norm(arguments, gate=jnp.asarray(gate))
    out, _ = run(arguments, implementation)
    normed = expected(pooled, arguments)
    assert relative(out[0, len(sizes) : 70], normed[len(sizes) :]) < BOUND
    assert np.abs(np.asarray(out, np.float32)[0, :6, -1]).max() < 1e-6
    for row in range(6, len(sizes)):
        assert relative(out[0, row], normed[row]) < BOUND


def case_with_a_gate_of_another_dtype():
    pooled, arguments = gated_case([65, 3], [0, -1])
    gate = arguments["output_norm"].gate.astype(jnp.float32)
    return pooled, arguments | with_norm(arguments, gate=gate)


def test_the_kernel_leaves_a_gate_of_another_dtype_to_xla(begun):
    _, arguments = case_with_a_gate_of_another_dtype()
    jax.jit(lambda: run(arguments, "mosaic_gpu_interpret")).lower()
    assert not begun


@pytest.mark.slow(
    reason="a norm that XLA leaves out behind the kernel; found by the same without kernels there, "
    "and on a GPU, where XLA norms halves in blocks of their own, too"
)
def test_a_gate_of_another_dtype_is_normed_by_xla(begun, monkeypatch):
    monkeypatch.setattr(gdn_prefill_state, "NUM_SMS", 3)
    pooled, arguments = case_with_a_gate_of_another_dtype()
    out, _ = run(arguments, "mosaic_gpu_interpret")
    assert not begun
    assert_normed(pooled, arguments, out)


def test_without_kernels_it_is_the_same():
    pooled, arguments = gated_case([1, 70, 64, 0], [0, 1, -1, 2])
    for name in ("q", "k", "v"):
        arguments[name] = arguments[name].astype(jnp.float32)
    assert_normed(pooled, arguments, run(arguments, "xla")[0])


def test_no_race_in_the_interpreter(begun, monkeypatch):
    """One block has all runs: its places in shared memory are loaded several times."""
    monkeypatch.setattr(gdn_prefill_state, "NUM_SMS", 1)
    pooled, arguments = gated_case([0, 70], [0, 2])
    with no_races():
        out, _ = jax.block_until_ready(run(arguments, "mosaic_gpu_interpret"))
    assert begun
    assert_normed(pooled, arguments, out)


@pytest.mark.gpu
@pytest.mark.parametrize("split_tokens", [0, 512])
def test_published_heads_equal_the_norm_behind_the_op(split_tokens):
    """And 100 times the same bits."""
    lens = [15, 85, 0, 200, 900, 848, 2049, 1]
    pooled, arguments = gated_case(lens, [0, 1, 2, -1, 3, 4, 5, 6], key_heads=16, value_heads=32)
    options = dict(implementation="mosaic_gpu", split_tokens=split_tokens)
    out, states = step(**arguments, **options)
    o, others = step(**without_norm(arguments), **options)
    np.testing.assert_array_equal(states, others)
    tokens, norm = pooled.live, arguments["output_norm"]
    normed = gated_rms_norm(o, norm.gate, norm.weight, EPS)
    normed = np.asarray(normed, np.float64)[0, tokens]
    # Both round o, and then the result.
    assert relative(out[0, tokens], normed) < 1e-3
    assert (np.asarray(out, np.float32)[0, ~tokens] == 0).all()
    for _ in range(100):
        again, _ = step(**arguments, **options)
        assert bool(jnp.array_equal(again, out))


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"weight": None}, TypeError, "output_norm.weight must be an array, got NoneType"),
        ({"gate": None}, TypeError, "output_norm.gate must be an array, got NoneType"),
        ({"gate": jnp.zeros((1, 79, 256))}, ValueError, r"gate must be \[1, 80, N\].*\[1, 79, 256"),
        ({"gate": jnp.zeros((1, 80, 255))}, ValueError, r"Hv \* Dv = 256, got \[1, 80, 255\]"),
        ({"gate": jnp.zeros((80, 256))}, ValueError, r"gate must be \[1, 80, N\]"),
        ({"gate": jnp.zeros((1, 80, 256), jnp.int32)}, TypeError, "gate must hold floats"),
        ({"weight": jnp.zeros(64)}, ValueError, r"output_norm.weight must be \[128\], got \[64\]"),
        ({"eps": "small"}, TypeError, "output_norm.eps"),
        ({"eps": float("nan")}, ValueError, "output_norm.eps"),
    ],
)
def test_bad_input_is_refused(changes, error, message):
    _, arguments = gated_case([70], [0])
    with pytest.raises(error, match=message):
        gated_delta_rule_prefill(**(arguments | with_norm(arguments, **changes)))
