"""The Mosaic GPU kernels of `chunk_gated_delta_rule` against float64, interpreted and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from kernel_cases import both_devices, relative

from jaxattn import gdn
from jaxattn.kernels.gdn_prefill import gdn_prefill_mosaic, segment_tokens

BOUND = 5e-3  # relative L2 of outputs and states in bfloat16


@dataclasses.dataclass
class Case:
    q: Array  # [1, T, Hk, 128]
    k: Array
    v: Array  # [1, T, Hv, 128]
    g: Array  # [1, T, Hv]
    beta: Array
    initial_state: Array  # [n, Hv, 128, 128]
    cu_seqlens: Array
    tokens: int  # T less the padding

    @property
    def args(self):
        return self.q, self.k, self.v, self.g, self.beta

    @property
    def packed(self):
        return {"initial_state": self.initial_state, "cu_seqlens": self.cu_seqlens}


def make_case(
    lens, *, key_heads=1, value_heads=2, dtype=jnp.bfloat16, padding=10, gates=1.0, seed=0
):
    """Sequences packed in one row, then `padding` tokens of NaN."""
    rng = np.random.default_rng(seed)
    tokens = sum(lens)
    total = tokens + padding

    def draw(*shape):
        x = rng.normal(size=(1, total, *shape))
        x[:, tokens:] = np.nan
        return x

    gate = -gates * rng.exponential(size=(1, total, value_heads))
    beta = rng.uniform(size=gate.shape)
    gate[:, tokens:] = beta[:, tokens:] = np.nan
    return Case(
        *(jnp.asarray(draw(heads, 128), dtype) for heads in (key_heads, key_heads, value_heads)),
        jnp.asarray(gate, jnp.float32),
        jnp.asarray(beta, jnp.float32),
        jnp.asarray(rng.normal(size=(len(lens), value_heads, 128, 128)), jnp.float32),
        jnp.asarray(np.cumsum([0, *lens]), jnp.int32),
        tokens,
    )


def oracle(case, *, l2norm=True, scale=128**-0.5):
    """(o [1, tokens, Hv, 128], final states) token by token in float64."""
    q, k, v, g, beta = (np.asarray(x[0, : case.tokens], np.float64) for x in case.args)
    if l2norm:
        q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    group = v.shape[1] // k.shape[1]
    q, k = (np.repeat(x, group, axis=1) for x in (q, k))
    out, states = np.zeros(v.shape), np.asarray(case.initial_state, np.float64).copy()
    offsets = np.asarray(case.cu_seqlens)
    for state, start, end in zip(states, offsets[:-1], offsets[1:], strict=True):
        for t in range(start, end):
            state *= np.exp(g[t])[:, None, None]
            delta = beta[t][:, None] * (v[t] - (state @ k[t][..., None])[..., 0])
            state += delta[..., None] * k[t][:, None]
            out[t] = scale * (state @ q[t][..., None])[..., 0]
    return out[None], states


def run(case, implementation, **options):
    options = {"use_qk_l2norm": True, "output_final_state": True} | options
    step = functools.partial(
        gdn.chunk_gated_delta_rule, implementation=implementation, **case.packed, **options
    )
    return jax.jit(step)(*case.args)


def assert_matches(case, out, states, *, bound=BOUND, **options):
    expected, expected_states = oracle(case, **options)
    assert relative(out[:, : case.tokens], expected) < bound
    assert relative(states, expected_states) < bound
    assert (np.asarray(out, np.float32)[:, case.tokens :] == 0).all()
    untouched = np.diff(case.cu_seqlens) == 0
    np.testing.assert_array_equal(
        np.asarray(states)[untouched].view(np.uint32),
        np.asarray(case.initial_state)[untouched].view(np.uint32),
    )


@both_devices
@pytest.mark.parametrize("lens", [[1, 0, 64], [63], [65, 2]])
def test_packed_sequences_before_nan(lens, implementation):
    case = make_case(lens)
    assert_matches(case, *run(case, implementation))


@both_devices
def test_a_batch_of_rows_in_float16(implementation):
    case = make_case([70, 70], key_heads=2, dtype=jnp.float16, padding=0)
    case.initial_state = jnp.zeros_like(case.initial_state)
    norm = lambda x: x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True)  # noqa: E731
    case.q, case.k = (norm(x).astype(jnp.float16) for x in (case.q, case.k))
    rows = (x.reshape(2, 70, *x.shape[2:]) for x in case.args)
    step = functools.partial(gdn.chunk_gated_delta_rule, implementation=implementation, scale=0.5)
    out, states = jax.jit(functools.partial(step, output_final_state=True))(*rows)
    assert states.shape == (2, 2, 128, 128) and states.dtype == jnp.float32
    out = out.reshape(1, 140, 2, 128)
    assert_matches(case, out, states, l2norm=False, scale=0.5, bound=2e-3)


@both_devices
def test_gates_from_nothing_to_minus_1000(implementation):
    case = make_case([67], value_heads=4)
    sparse = 1e-3 * case.g[..., 2:]
    sparse = jnp.where(jnp.arange(77)[:, None] % 5 > 0, sparse, -1000.0 + sparse)
    case.g = case.g.at[..., 0].set(0.0).at[..., 1].set(-1000.0).at[..., 2:].set(sparse)
    case.g = case.g.at[0, 9, 3].set(-jnp.inf)
    out, states = run(case, implementation)
    assert_matches(case, out, states)
    expected, expected_states = oracle(case)
    for head in range(4):  # without decay the outputs are larger: each head has to be right
        assert relative(out[:, :67, head], expected[:, :, head]) < BOUND
        assert relative(states[:, head], expected_states[:, head]) < BOUND


@both_devices
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_equal_keys_without_decay(beta, implementation):
    """(I + A)^-1 of ones below the diagonal: powers of A would reach 1e18."""
    case = make_case([64], padding=0)
    case.k = jnp.broadcast_to(case.k[:, :1], case.k.shape)
    case.g, case.beta = jnp.zeros_like(case.g), jnp.full_like(case.beta, beta)
    assert_matches(case, *run(case, implementation))


def test_no_race_in_the_interpreter():
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    case = make_case([0, 194])
    out, states = gdn_prefill_mosaic(
        *case.args, **case.packed, scale=128**-0.5, use_qk_l2norm=True,
        interpret=True, detect_races=True,
    )  # fmt: skip
    assert not get_races().races_found
    assert_matches(case, out, states)


@both_devices
def test_segments_equal_one_run(implementation):
    case = make_case([0, 140], gates=0.02)
    assert_matches(case, *run(case, implementation, split_tokens=64))


def test_splits_of_half_a_chunk_are_an_error():
    with pytest.raises(ValueError, match="split_tokens must be None, 0 or a multiple"):
        run(make_case([8]), "xla", split_tokens=96)


@pytest.mark.parametrize(
    "length, count, value_heads", [(32768, 1, 8), (8192, 1, 8), (32768, 1, 32), (140, 2, 2)]
)
def test_segments_fill_the_machine_where_sequences_do_not(length, count, value_heads):
    segment = segment_tokens(length, count, value_heads)
    assert segment % 64 == 0
    assert (segment > 0) == (length > 140)
    assert segment_tokens(4 * 8192, 4, 32) == segment_tokens(64 * 1024, 64, 32) == 0


def test_the_gradient_is_the_reference_implementations():
    case = make_case([20], padding=3)
    case.q, case.k, case.v, case.g, case.beta = (jnp.nan_to_num(x) for x in case.args)
    weights = jax.random.normal(jax.random.key(0), case.v.shape)

    def loss(implementation, q, k, v, g, beta, state):
        out, final = gdn.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, cu_seqlens=case.cu_seqlens,
            use_qk_l2norm=True, output_final_state=True, implementation=implementation,
        )  # fmt: skip
        return (out * weights).sum() + final.sum()

    gradient = jax.grad(loss, argnums=(1, 2, 3, 4, 5, 6))
    actual, expected = (
        gradient(name, *case.args, case.initial_state) for name in ("mosaic_gpu_interpret", "xla")
    )
    for ours, reference in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(ours, reference)


def test_refuses_what_it_has_no_code_for():
    case = make_case([8], padding=0)
    refused = functools.partial(run, implementation="mosaic_gpu_interpret")
    with pytest.raises(NotImplementedError, match="chunk_size 64, got 32"):
        refused(case, chunk_size=32)
    with pytest.raises(NotImplementedError, match="got float32"):
        refused(dataclasses.replace(case, **{n: getattr(case, n).astype("f4") for n in "qkv"}))
    narrow = dataclasses.replace(case, q=case.q[..., :64], k=case.k[..., :64])
    narrow.initial_state = case.initial_state[..., :64]
    with pytest.raises(NotImplementedError, match="Dk=64"):
        refused(narrow)
    empty = dataclasses.replace(case, **{n: getattr(case, n)[:, :0] for n in ("q", "k", "v")})
    empty.g, empty.beta = case.g[:, :0], case.beta[:, :0]
    empty.cu_seqlens = jnp.zeros(2, jnp.int32)
    with pytest.raises(NotImplementedError, match="without a token"):
        refused(empty)


def assert_matches_float32(case, out, states):
    """Long cases: the reference recurrence in float32, on the same device."""
    arguments = (x.astype(jnp.float32) for x in case.args)
    expected = jax.jit(
        functools.partial(
            gdn.recurrent_gated_delta_rule,
            **case.packed,
            use_qk_l2norm=True,
            output_final_state=True,
        )  # fmt: skip
    )(*arguments)
    assert relative(out, np.asarray(expected[0], np.float64)) < BOUND
    assert relative(states, np.asarray(expected[1], np.float64)) < BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("gates", [1.0, 0.002])
@pytest.mark.parametrize("key_heads, value_heads", [(2, 8), (16, 16), (16, 32), (16, 48)])
def test_published_heads(key_heads, value_heads, gates):
    lens = [15, 85, 0, 200, 900, 848, 2049]
    case = make_case(lens, key_heads=key_heads, value_heads=value_heads, gates=gates)
    assert_matches_float32(case, *run(case, "mosaic_gpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("gates", [1.0, 0.002])
def test_one_long_sequence(gates):
    case = make_case([8192], key_heads=2, value_heads=8, gates=gates)
    assert_matches_float32(case, *run(case, "mosaic_gpu"))


@pytest.mark.gpu
def test_many_short_documents_in_more_than_65535_blocks():
    lens = np.random.default_rng(1).integers(0, 5, 2050).tolist()
    case = make_case(lens, key_heads=16, value_heads=32)
    assert_matches_float32(case, *run(case, "mosaic_gpu"))


@pytest.mark.gpu
def test_two_parts_equal_one():
    case = make_case([300], value_heads=4, key_heads=2, padding=0)
    whole, state = run(case, "mosaic_gpu")
    first = Case(*(x[:, :127] for x in case.args), case.initial_state, jnp.array([0, 127]), 127)
    out_a, middle = run(first, "mosaic_gpu")
    second = Case(*(x[:, 127:] for x in case.args), middle, jnp.array([0, 173]), 173)
    out_b, end = run(second, "mosaic_gpu")
    assert relative(jnp.concatenate([out_a, out_b], axis=1), np.asarray(whole, np.float64)) < BOUND
    assert relative(end, np.asarray(state, np.float64)) < BOUND


@pytest.mark.gpu
def test_the_same_bits_every_run():
    case = make_case([700, 64, 1300], key_heads=4, value_heads=8)
    first = run(case, "mosaic_gpu")
    for _ in range(100):
        again = run(case, "mosaic_gpu")
        assert all(bool((a == b).all()) for a, b in zip(again, first, strict=True))
