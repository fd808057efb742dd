"""`kimi_delta_attention_decode` and `kda_decode` against float64: XLA, interpreted, on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxattn import kda
from jaxattn.arena import Arena
from jaxattn.kernels.gdn.decode import launch
from jaxattn.kernels.gdn.decode.mainloop import GdnDecodeTileConfig
from tests.helpers.kernel_cases import launch_gdn_decode, no_races, relative, slow_interpreted

implementations = pytest.mark.parametrize(
    "implementation",
    ["xla", "mosaic_gpu_interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)],
)
DIM, EPS = 128, 1e-5


@dataclasses.dataclass
class Case:
    qkv: Array  # [B, S, 3 H D]
    f: Array  # [B, S, H D]
    b: Array  # [B, S, H]
    gate: Array  # [B, S, H D]
    A_log: Array  # of all layers, as the next three
    dt_bias: Array  # [L, H D]
    norm: Array  # [L, D]
    conv: Array  # [L, 3 H D, W]
    conv_state: Array  # [L, Z, W - 1, 3 H D]
    state: Array  # [L, Z, H, D, D]
    reads: Array

    @property
    def args(self) -> tuple[Array, ...]:
        weights = kda.pack_kda_weights(self.A_log, self.dt_bias, self.norm, self.conv)
        inputs = self.qkv, self.f, self.b, self.gate
        return *inputs, weights, self.conv_state, self.state, self.reads


def make(slots, *, num_slots=6, q_len=1, heads=2, dtype=jnp.float32, seed=0, spread=1.0) -> Case:
    """Layer 1 of 2; NaN in every slot that no row reads, and in the inputs of padding rows.

    `spread`: of what the decays are made of; at 1e4 a decay is 0 or 1 exactly.
    """
    rng = np.random.default_rng(seed)
    batch, width = len(slots), heads * DIM
    real, live = np.array(slots)[:, None, None] >= 0, [slot for slot in slots if slot >= 0]
    conv_state = np.full((2, num_slots, 3, 3 * width), np.nan)
    state = np.full((2, num_slots, heads, DIM, DIM), np.nan)
    conv_state[1, live] = rng.normal(size=(len(live), 3, 3 * width))
    state[1, live] = rng.normal(size=(len(live), heads, DIM, DIM))

    def rows(*shape, dtype=dtype):
        x = rng.normal(size=(batch, q_len, *shape))
        return jnp.asarray(np.where(real, x, np.nan), dtype)

    def layers(*shape):
        return jnp.asarray(rng.normal(size=(2, *shape)), jnp.float32)

    return Case(
        qkv=rows(3 * width),
        f=rows(width, dtype=jnp.float32) * spread,
        b=rows(heads, dtype=jnp.float32),
        gate=rows(width),
        A_log=layers(heads),
        dt_bias=layers(width),
        norm=layers(DIM),
        conv=layers(3 * width, 4),
        conv_state=jnp.asarray(conv_state, dtype),
        state=jnp.asarray(state, jnp.float32),
        reads=jnp.asarray(slots, jnp.int32),
    )


def oracle(case: Case, lower_bound=None):
    """(y, the convolution's and the recurrent states after each token [S, B, ...]) in float64."""
    f64 = lambda x: np.asarray(x, np.float64)  # noqa: E731
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    sigmoid = lambda x: 0.5 * (1 + np.tanh(x / 2))  # noqa: E731
    heads, (batch, q_len, _) = case.state.shape[2], case.qkv.shape
    rate, norm, taps = np.exp(f64(case.A_log)[1])[:, None], f64(case.norm)[1], f64(case.conv)[1]
    bias = f64(case.dt_bias)[1].reshape(heads, DIM)
    # NumPy's: of JAX's arrays each slice of a new shape is a program.
    qkv, f, b, gate = (np.asarray(x) for x in (case.qkv, case.f, case.b, case.gate))
    conv_state, states_before = np.asarray(case.conv_state), np.asarray(case.state)
    y = np.zeros((batch, q_len, heads, DIM))
    convs = np.zeros((q_len, batch, 3, 3 * heads * DIM))
    states = np.zeros((q_len, batch, heads, DIM, DIM))
    for row, slot in enumerate(np.asarray(case.reads)):
        if slot < 0:
            continue
        window, state = f64(conv_state[1, slot]), f64(states_before[1, slot])
        for t in range(q_len):
            window = np.concatenate([window, f64(qkv[row, t])[None]])
            mixed = (window * taps.T).sum(0)
            window = window[1:]
            q, k, v = (mixed * sigmoid(mixed)).reshape(3, heads, DIM)
            q, k = unit(q) * DIM**-0.5, unit(k)
            x = f64(f[row, t]).reshape(heads, DIM) + bias
            g = -rate * np.logaddexp(0, x)
            if lower_bound is not None:
                g = lower_bound * sigmoid(rate * x)
            state = state * np.exp(g)[:, None]
            beta = sigmoid(f64(b[row, t]))[:, None]
            delta = beta * (v - np.einsum("hvd,hd->hv", state, k))
            state = state + delta[..., None] * k[:, None]
            o = np.einsum("hvd,hd->hv", state, q)
            rms = np.sqrt((o * o).mean(-1, keepdims=True) + EPS)
            z = f64(gate[row, t]).reshape(heads, DIM)
            y[row, t] = o / rms * norm * sigmoid(z)
            convs[t, row], states[t, row] = window, state
    return y.reshape(batch, q_len, -1), convs, states


@functools.cache
def step_of(implementation, lower_bound, config):
    """Traced once for a shape; of another configuration of the kernel again."""
    step = functools.partial(
        kda.kimi_delta_attention_decode, layer=1, eps=EPS, implementation=implementation,
        lower_bound=lower_bound,
    )  # fmt: skip
    return jax.jit(step)


def decode(case, implementation, *, lower_bound=None, config=None, **options):
    return step_of(implementation, lower_bound, config)(*case.args, **options)


def assert_matches(case, found, *, bound=1e-5, writes=None, lower_bound=None):
    y, conv_state, state = (np.asarray(x, np.float64) for x in found[:3])
    expected, convs, states = oracle(case, lower_bound)
    live = np.asarray(case.reads) >= 0
    assert relative(y[live], expected[live]) < bound
    np.testing.assert_array_equal(y[~live], 0)
    targets = np.asarray(case.reads)[:, None] if writes is None else np.asarray(writes)
    steps = range(case.qkv.shape[1] - targets.shape[1], case.qkv.shape[1])
    untouched = np.ones(state.shape[:2], bool)
    for row in np.flatnonzero(live):
        for t, slot in zip(steps, targets[row], strict=True):
            if slot >= 0:
                np.testing.assert_array_equal(conv_state[1, slot], convs[t, row])
                assert relative(state[1, slot], states[t, row]) < bound
                untouched[1, slot] = False
    for new, old in ((conv_state, case.conv_state), (state, case.state)):
        np.testing.assert_array_equal(new[untouched], np.asarray(old, np.float64)[untouched])


@pytest.mark.sampled
@implementations
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_shuffled_slots_beside_padding(lower_bound, implementation):
    case = make([4, -1, 0])
    found = decode(case, implementation, lower_bound=lower_bound)
    assert_matches(case, found, lower_bound=lower_bound)


@implementations
def test_states_of_every_token_go_where_they_are_wanted(implementation):
    case = make([4, -1, 0], q_len=3, num_slots=8)
    writes = jnp.array([[1, -1, 4], [-1, -1, -1], [2, 7, 3]], jnp.int32)
    found = decode(case, implementation, write_indices=writes)
    assert_matches(case, found, writes=writes)


@implementations
def test_decays_of_exactly_zero_and_one(implementation):
    case = make([4, -1, 0], spread=1e4)
    assert_matches(case, decode(case, implementation))


@slow_interpreted(
    "an input that is rounded; found by half-precision inputs of the gated delta net, whose body "
    "this is, in ops/gdn/test_layer_decode, by XLA's layer, and on a GPU, too",
    "xla",
)
def test_bfloat16_inputs(implementation):
    case = make([4, -1, 0], dtype=jnp.bfloat16)
    found = decode(case, implementation)
    assert found[0].dtype == jnp.bfloat16
    assert relative(found[0], oracle(case)[0]) < 1e-2


@pytest.mark.slow(
    reason="a block's part of a state; found by races of four blocks, of which each number is "
    "compared there, too"
)
def test_four_blocks_a_state_in_the_interpreter(monkeypatch):
    monkeypatch.setattr(launch, "choose_config", lambda *_, **__: GdnDecodeTileConfig(split=True))
    case = make([4, -1, 0])
    assert_matches(case, decode(case, "mosaic_gpu_interpret", config="split"))


@pytest.mark.parametrize(
    "config", [GdnDecodeTileConfig(), GdnDecodeTileConfig(split=True)], ids=["ring", "split"]
)
def test_no_races(config):
    case = make([1, -1], heads=1, num_slots=2)
    qkv, f, b, gate, weights, *pools, reads = case.args
    with no_races():
        found = launch_gdn_decode(
            "kda", qkv, b, weights, *pools, reads, reads, num_key_heads=1, layer=1, eps=EPS,
            scale=DIM**-0.5, f=f, z=gate, config=config, interpret=True,
        )  # fmt: skip
        jax.block_until_ready(found)
    assert_matches(case, (found[0].reshape(2, 1, -1), *found[1:]))


@slow_interpreted("a gate from behind the columns; found by XLA's layer, and on a GPU, too", "xla")
def test_columns_behind_b_are_not_read(implementation):
    case = make([4, -1, 0])
    expected = decode(case, "xla")
    case.b = jnp.pad(case.b, ((0, 0), (0, 0), (0, 30)), constant_values=np.nan)
    for ours, theirs in zip(decode(case, implementation), expected, strict=True):
        assert relative(np.nan_to_num(np.asarray(ours)), np.nan_to_num(np.asarray(theirs))) < 1e-5


@slow_interpreted(
    "a key head of another value head; found by groups of value heads in "
    "ops/gdn/test_layer_decode, whose body this is, by decays of each channel there, and on a GPU, "
    "too",
    "xla",
)
def test_the_rule_alone_with_two_value_heads_a_key_head(implementation):
    rng = np.random.default_rng(3)
    q, k = (jnp.asarray(rng.normal(size=(3, 2, 1, DIM)), jnp.float32) for _ in range(2))
    v, f = (jnp.asarray(rng.normal(size=(3, 2, 2, DIM)), jnp.float32) for _ in range(2))
    b, A_log = rng.normal(size=(3, 2, 2)), rng.normal(size=2)
    dt_bias, pool = rng.normal(size=(2, DIM)), rng.normal(size=(4, 2, DIM, DIM))
    given = q, k, v, f, b, jnp.asarray(pool, jnp.float32), jnp.array([3, -1, 0], jnp.int32)
    step = functools.partial(kda.kda_decode, A_log=A_log, dt_bias=dt_bias)
    found, expected = (step(*given, implementation=each) for each in (implementation, "xla"))
    for ours, theirs in zip(found, expected, strict=True):
        assert relative(ours, np.asarray(theirs)) < 1e-5


# --- a GPU alone: one, four and less blocks per state --------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 20, 70])
@pytest.mark.parametrize("q_len", [1, 4, 8])
def test_many_rows_on_a_gpu(rows, q_len):
    rng = np.random.default_rng(rows)
    slots = rng.permutation(rows + 4)[:rows].tolist()
    slots[rows // 2] = slots[rows // 2] if rows == 1 else -1
    case = make(slots, num_slots=rows + 4, q_len=q_len, heads=16, seed=rows)
    first, again = (decode(case, "mosaic_gpu") for _ in range(2))
    assert_matches(case, first)
    jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_arena_and_states_of_either_dtype_on_a_gpu(dtype):
    case = make([4, -1, 0, 5], q_len=2, heads=4, dtype=jnp.bfloat16)
    case.state = case.state.astype(dtype)
    scratch = kda.scratch(batch=4, q_len=2, num_v_heads=4, dtype=jnp.bfloat16)
    found = decode(case, "mosaic_gpu", arena=Arena.allocate(scratch))
    expected = decode(case, "xla")
    for ours, theirs in zip(found[:3], expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert relative(np.nan_to_num(np.asarray(ours, np.float64)),
                        np.nan_to_num(np.asarray(theirs, np.float64))) < 1e-2  # fmt: skip


@pytest.mark.parametrize(
    "change, message",
    [
        ({"f": np.zeros((3, 1, 4))}, r"f must be \[3, 1, 256\], got \[3, 1, 4\]"),
        ({"gate": np.zeros((3, 256))}, r"gate must be \[3, 1, 256\]"),
        (
            {"b": np.zeros((3, 1, 1))},
            r"b must be \[3, 1, 2\], optionally with more columns after these",
        ),
        ({"weights": np.zeros(7, np.float32)}, "as pack_kda_weights returns them"),
        ({"lower_bound": 0.0}, "lower_bound must be below 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    names = ("qkv", "f", "b", "gate", "weights", "conv_state", "state", "state_indices")
    given = dict(zip(names, make([4, -1, 0]).args, strict=True))
    with pytest.raises(ValueError, match=message):
        kda.kimi_delta_attention_decode(**given | change, layer=1)
