"""The modules compute what DeepSeek-V3 and Qwen3-Next define, trained, prefilled or decoding."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn import mla
from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.numerics.rope import RopeConfig, YarnConfig, rope, softmax_scale
from jaxattn.nn import GatedDeltaNet, GatedMLP, Linear, MultiHeadLatentAttention, RMSNorm
from jaxattn.nn.linear import StackedWeight, matmul
from tests.helpers.at_once import at_once
from tests.helpers.draws import normals
from tests.helpers.kernel_cases import slow
from tests.helpers.training import train

F32 = jnp.float32
HIDDEN, TOKENS, PAGE = 24, 11, 4


def normal(seed: int, *shape: int, dtype=F32):
    return normals(seed)(*shape, dtype=dtype)


def small_mla(**changes) -> MultiHeadLatentAttention:
    sizes = dict(kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
    kwargs = dict(rope=RopeConfig(dim=4), dtype=F32, rngs=nnx.Rngs(1)) | sizes | changes
    return MultiHeadLatentAttention(HIDDEN, 3, **kwargs)


def small_gdn(**changes) -> GatedDeltaNet:
    kwargs = dict(head_k_dim=8, head_v_dim=6, dtype=F32, rngs=nnx.Rngs(2)) | changes
    return GatedDeltaNet(HIDDEN, 1, 2, **kwargs)


# --- the small ones


def test_rms_norm_is_x_over_rms_times_weight_in_float32():
    norm = RMSNorm(HIDDEN, eps=1e-5)
    norm.weight[...] = normal(0, HIDDEN)
    x = normal(1, 2, HIDDEN, dtype=jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    y = norm(x)
    assert y.dtype == F32
    np.testing.assert_allclose(y, expected * np.asarray(norm.weight[...]), rtol=2e-6)


def test_matmul_rounds_operands_and_keeps_sums_in_float32():
    x, w = normal(0, 3, 5, 64), normal(1, 64, 7)
    rounded = [np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (x, w)]
    y = matmul(x, w, jnp.bfloat16)
    assert y.dtype == F32
    np.testing.assert_allclose(y, rounded[0] @ rounded[1], rtol=1e-5, atol=1e-5)


def test_matmul_gradients_come_in_the_operands_own_dtypes():
    x, w = normal(0, 3, 5, 16, dtype=jnp.bfloat16), normal(1, 16, 7)
    target = normal(2, 3, 5, 7)
    dx, dw = jax.grad(lambda x, w: jnp.sum(matmul(x, w, jnp.bfloat16) * target), (0, 1))(x, w)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, F32)
    g = np.asarray(target.astype(jnp.bfloat16), np.float64)
    np.testing.assert_allclose(
        dw, np.einsum("btk,btn->kn", np.asarray(x, np.float64), g), rtol=1e-5, atol=1e-5
    )
    w_rounded = np.asarray(w.astype(jnp.bfloat16), np.float64)
    np.testing.assert_allclose(np.asarray(dx, np.float64), g @ w_rounded.T, rtol=1e-2, atol=1e-2)


def test_linear_weights_have_the_stated_spread():
    weight = Linear(256, 512, init_scale=0.5, rngs=nnx.Rngs(0)).weight[...]
    np.testing.assert_allclose(np.std(weight), 0.5 / 16, rtol=0.02)


def test_gated_mlp_is_swiglu():
    mlp = GatedMLP(HIDDEN, 10, dtype=F32, rngs=nnx.Rngs(0))
    x = normal(0, 2, HIDDEN)
    gate, up = x @ mlp.gate_proj.weight[...], x @ mlp.up_proj.weight[...]
    expected = (gate * jax.nn.sigmoid(gate) * up) @ mlp.down_proj.weight[...]
    np.testing.assert_allclose(mlp(x), expected, rtol=1e-4, atol=1e-5)


# --- MLA


def naive_mla(module: MultiHeadLatentAttention, x: np.ndarray, config: RopeConfig) -> np.ndarray:
    """DeepSeek-V3's equations for one sequence [T, hidden], head by head, nothing absorbed."""

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(weight)

    def weight(linear):
        return np.asarray(linear.weight[...], np.float64)

    tokens, heads, rank, nope = len(x), 3, 32, 8
    positions = jnp.arange(tokens)
    if hasattr(module, "q_a_proj"):
        q = norm(x @ weight(module.q_a_proj), module.q_a_norm.weight[...]) @ weight(module.q_b_proj)
    else:
        q = x @ weight(module.q_proj)
    q = q.reshape(tokens, heads, -1)
    kv = x @ weight(module.kv_a_proj)
    c = norm(kv[:, :rank], module.kv_a_norm.weight[...])
    k_pe = np.asarray(rope(jnp.asarray(kv[:, rank:], F32), positions, config))
    out = []
    for h in range(heads):
        q_pe = np.asarray(rope(jnp.asarray(q[:, h, nope:], F32), positions, config))
        k = c @ np.asarray(module.w_uk[...], np.float64)[h].T
        scores = (q[:, h, :nope] @ k.T + q_pe @ k_pe.T) * softmax_scale(12, config)
        scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(p / p.sum(-1, keepdims=True) @ c @ np.asarray(module.w_uv[...], np.float64)[h])
    return np.concatenate(out, axis=-1) @ weight(module.o_proj)


YARN = RopeConfig(
    dim=4,
    yarn=YarnConfig(factor=8, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.7),
)


@pytest.mark.parametrize(
    ("q_lora_rank", "config"), [(None, RopeConfig(dim=4)), (12, RopeConfig(dim=4)), (None, YARN)]
)
def test_mla_matches_the_papers_equations(q_lora_rank, config):
    module = small_mla(q_lora_rank=q_lora_rank, rope=config)
    x = normal(3, 1, TOKENS, HIDDEN)
    expected = naive_mla(module, np.asarray(x[0], np.float64), config)
    np.testing.assert_allclose(jax.jit(module)(x)[0], expected, rtol=1e-4, atol=1e-5)


def test_mla_refuses_a_rope_of_another_width():
    with pytest.raises(ValueError, match=r"rope\.dim must be qk_rope_head_dim=4; got 8"):
        small_mla(rope=RopeConfig(dim=8))


@pytest.mark.slow_cases(reason="an index into a stack; found by a traced number too")
@pytest.mark.parametrize("stack", ["plain", slow("python_layer"), "traced_layer"])
def test_mla_prefill_and_decode_continue_the_training_forward(stack):
    module = small_mla()
    x = normal(3, 2, TOKENS, HIDDEN)
    expected = jax.jit(module)(x)
    tables = jnp.array([[2, 0, 5], [1, 4, 3]], jnp.int32)
    shape = (6, PAGE, 36) if stack == "plain" else (3, 6, PAGE, 36)
    layer = {"plain": None, "python_layer": 1, "traced_layer": jnp.int32(1)}[stack]
    cache = jnp.full(shape, jnp.nan)  # never written, so never to be seen

    @jax.jit
    def prefill(x, cache, lens, layer):
        return module.prefill(
            x, cache, block_tables=tables, seq_lens=lens, query_lens=lens, layer=layer
        )

    @jax.jit
    def decode(x, cache, lens, layer):
        return module.decode(x, cache, block_tables=tables, seq_lens=lens, layer=layer)[:2]

    lens = jnp.array([5, 3], jnp.int32)
    y, cache = prefill(x[:, :6], cache, lens, layer)
    for b, n in enumerate(lens):
        np.testing.assert_allclose(y[b, :n], expected[b, :n], rtol=1e-4, atol=1e-5)
        assert not np.any(y[b, n:])
    for _ in range(3):  # two tokens per row at a time
        new = jnp.stack([x[b, n : n + 2] for b, n in enumerate(lens)])
        lens = lens + 2
        y, cache = decode(new, cache, lens, layer)
        for b, n in enumerate(lens):
            np.testing.assert_allclose(y[b], expected[b, n - 2 : n], rtol=1e-4, atol=1e-5)


def test_mla_decodes_ragged_rows_from_an_fp8_cache():
    module = small_mla()
    x = normal(3, 2, TOKENS, HIDDEN)
    expected = jax.jit(module)(x)
    cache = jnp.full((6, PAGE, 36), jnp.nan, jnp.float8_e4m3fn)
    shared = dict(block_tables=jnp.array([[2, 0, 5], [1, 4, 3]], jnp.int32), kv_scale=2.0**-6)
    lens = jnp.array([8, 5], jnp.int32)
    prefill, decode = jax.jit(module.prefill), jax.jit(module.decode)
    _, cache = prefill(x[:, :8], cache, seq_lens=lens, query_lens=lens, **shared)
    new = jnp.array([1, 3], jnp.int32)
    tokens = jnp.stack([x[0, 8:11].at[1:].set(jnp.nan), x[1, 5:8]])
    y, after, _ = decode(tokens, cache, seq_lens=lens + new, query_lens=new, **shared)
    assert after.dtype == cache.dtype
    for b, n in enumerate(lens):
        wanted = expected[b, n : n + new[b]]
        np.testing.assert_allclose(y[b, : new[b]], wanted, atol=0.1 * np.abs(wanted).max())
    assert not np.any(y[0, 1:])


# --- gated delta net


@pytest.mark.slow_cases(
    reason="a head that reads the padding; found by kernels/mla/decode, which poisons it, too"
)
@pytest.mark.parametrize("numbers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_heads_that_are_no_multiple_of_eight_are_decoded_without_a_pad(numbers):
    """Decode reads queries in eights of heads; what lies behind the heads is NaN here."""
    module = MultiHeadLatentAttention(
        64, 3, qk_nope_head_dim=64, v_head_dim=64, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    x, cache = normal(1, 1, 1, 64), normal(2, 1, 1, 16, 576, dtype=jnp.bfloat16)
    given = dict(
        block_tables=jnp.zeros((1, 1), jnp.int32), seq_lens=jnp.array([5], jnp.int32), layer=0
    )
    if numbers:
        wanted, *_ = module.decode(x, cache, **given, implementation="xla")
    for name in ("w_uk", "w_uv"):
        stack, layer = getattr(module, name)[...][None], LayerIndex(jnp.int32(0), 1, 0)
        place = StackedWeight(stack, layer, "mosaic_gpu_interpret")
        setattr(module, f"{name}_in_stack", place)
    rotation = module.decode_rotation(given["seq_lens"], 1)
    q = jnp.zeros((1, 1, 3, 128), jnp.bfloat16)
    (queries,) = jax.eval_shape(lambda: module._latent_queries(q, rotation, 5))
    assert queries.shape == (1, 1, 8, 576)
    with mock.patch.object(mla, "mla_decode", side_effect=mla.mla_decode) as op:
        decode = functools.partial(
            module.decode, x, cache, **given, implementation="mosaic_gpu_interpret"
        )
        found, *_ = decode() if numbers else jax.eval_shape(decode)
    [call] = op.call_args_list
    assert call.args[0].shape == (1, 1, 8, 576)
    if numbers:
        np.testing.assert_allclose(found, wanted, rtol=3e-2, atol=3e-2)


def naive_gdn(module: GatedDeltaNet, x: np.ndarray) -> np.ndarray:
    """Qwen3-Next's layer for one sequence [T, hidden], token by token."""

    def silu(x):
        return x / (1 + np.exp(-x))

    def weight(parameter):
        return np.asarray(parameter[...], np.float64)

    dk, dv, heads = 8, 6, 2
    mixed, z = np.split(x @ weight(module.in_proj_qkvz.weight), [2 * dk + heads * dv], axis=-1)
    b, a = np.split(x @ weight(module.in_proj_ba.weight), 2, axis=-1)
    padded = np.concatenate([np.zeros((3, mixed.shape[1])), mixed])
    taps = weight(module.conv1d)
    mixed = silu(sum(padded[j : j + len(x)] * taps[:, j] for j in range(4)))
    beta = 1 / (1 + np.exp(-b))
    rate = np.exp(weight(module.A_log))
    alpha = np.exp(-rate * np.log1p(np.exp(a + weight(module.dt_bias))))
    state, out = np.zeros((heads, dv, dk)), []
    for t in range(len(x)):
        q, k = mixed[t, :dk], mixed[t, dk : 2 * dk]
        q, k = (u / np.sqrt((u**2).sum() + 1e-6) for u in (q, k))
        row = []
        for h in range(heads):
            v = mixed[t, 2 * dk + h * dv :][:dv]
            state[h] *= alpha[t, h]
            state[h] += np.outer(beta[t, h] * (v - state[h] @ k), k)
            o = state[h] @ q / np.sqrt(dk)
            o = o / np.sqrt((o**2).mean() + 1e-6) * weight(module.norm.weight)
            row.append(o * silu(z[t, h * dv :][:dv]))
        out.append(np.concatenate(row))
    return np.stack(out) @ weight(module.out_proj.weight)


def test_gdn_matches_qwen3_nexts_equations():
    module = small_gdn()
    module.norm.weight[...] = 1 + normal(5, 6) / 4
    x = normal(4, 1, TOKENS, HIDDEN)
    expected = naive_gdn(module, np.asarray(x[0], np.float64))
    np.testing.assert_allclose(jax.jit(module)(x)[0], expected, rtol=1e-3, atol=1e-5)


def gdn_pools(fill: float, layers: int | None = 3, slots: int = 4) -> tuple:
    lead = (slots,) if layers is None else (layers, slots)
    return jnp.full((*lead, 3, 28), fill), jnp.full((*lead, 2, 6, 8), fill)


@jax.jit
def gdn_prefill(module, x, pools, slots, seq_lens, query_lens, layer):
    y, *pools = module.prefill(
        x,
        *pools,
        state_indices=slots,
        seq_lens=seq_lens,
        query_lens=query_lens,
        layer=layer,
    )
    return y, pools


@jax.jit
def gdn_decode(module, x, pools, slots, layer):
    y, *pools, _ = module.decode(x, *pools, state_indices=slots, layer=layer)
    return y, pools


@pytest.mark.slow_cases(
    reason="a layer without a stack; found by a layer of a stack, by its Python number too"
)
@pytest.mark.parametrize("layer", [slow(None), 1])
def test_gdn_prefill_and_decode_continue_the_training_forward(layer):
    module = small_gdn()
    x = normal(4, 2, TOKENS, HIDDEN)
    expected = jax.jit(module)(x)
    slots = np.array([3, 0], np.int32)
    # NaN: what an earlier row left in a slot must not reach a fresh one.
    pools = gdn_pools(jnp.nan, None if layer is None else 3)
    done = np.zeros(2, np.int32)

    def check(y, count):
        for b in range(2):
            np.testing.assert_allclose(
                y[b, : count[b]], expected[b, done[b] :][: count[b]], rtol=1e-3, atol=1e-5
            )
            assert not np.any(y[b, count[b] :])

    # Chunks longer and shorter than the convolution, and one that a row sits out.
    for count in np.array([[6, 2], [1, 6], [0, 1]], np.int32):
        chunk = np.stack([np.roll(x[b], -done[b], axis=0)[:6] for b in range(2)])
        y, pools = gdn_prefill(module, chunk, pools, slots, done + count, count, layer)
        check(y, count)
        done = done + count
    for active in np.array([[1, 1], [1, 0], [1, 1]]):
        token = np.stack([x[b, done[b]][None] for b in range(2)])
        y, pools = gdn_decode(module, token, pools, np.where(active, slots, -1), layer)
        check(y, active)
        done = done + active


def test_gdn_padding_rows_are_zero_and_write_nothing_whatever_they_hold():
    module = small_gdn()
    x = normal(4, 3, 4, HIDDEN).at[1].set(jnp.nan)
    slots = jnp.array([2, -1, 0], jnp.int32)
    pools = gdn_pools(0.5)
    lens = np.array([4, 0, 3], np.int32)
    y, after = gdn_prefill(module, x, pools, slots, lens, lens, jnp.int32(1))
    assert not np.any(y[1]) and np.all(np.isfinite(y))
    y, later = gdn_decode(module, x[:, :1], after, slots, jnp.int32(1))
    assert not np.any(y[1]) and np.all(np.isfinite(y))
    for pool in (*after, *later):
        untouched = np.ones(pool.shape[:2], bool)
        untouched[1, [0, 2]] = False
        assert np.all(np.asarray(pool)[untouched] == 0.5)
        assert not np.any(np.all(np.asarray(pool)[~untouched] == 0.5, axis=(1, 2)))


def test_gdn_decode_goes_on_from_the_last_accepted_token():
    module, x = small_gdn(), normal(4, 1, 4, HIDDEN)
    slot, kept = jnp.array([2], jnp.int32), jnp.array([[0, 1, 3]], jnp.int32)
    pools = straight = gdn_pools(0.25)
    for t in (0, 1, 3):
        expected, straight = gdn_decode(module, x[:, t : t + 1], straight, slot, 1)
    # Two of three tokens are accepted.
    _, *pools, _ = jax.jit(module.decode)(
        x[:, :3], *pools, state_indices=slot, write_indices=kept, layer=jnp.int32(1)
    )
    y, pools = gdn_decode(module, x[:, 3:], pools, kept[:, 1], 1)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)
    for pool, other in zip(pools, straight, strict=True):
        np.testing.assert_allclose(pool[1, 1], other[1, 2], rtol=1e-4, atol=1e-6)
        assert np.all(np.asarray(pool[1, 2]) == 0.25)


def test_gdn_packed_weights_of_a_stack_give_the_same_bits():
    modules = [small_gdn(rngs=nnx.Rngs(seed)) for seed in (0, 1)]
    weights = jnp.stack([module.packed_weights() for module in modules])
    x, slots = normal(4, 2, 1, HIDDEN), jnp.array([3, 0], jnp.int32)
    arguments = dict(state_indices=slots, layer=jnp.int32(1))
    decode = jax.jit(modules[1].decode)
    plain = decode(x, *gdn_pools(0.25, 2), **arguments)
    packed = decode(x, *gdn_pools(0.25, 2), weights=weights, **arguments)
    jax.tree.map(np.testing.assert_array_equal, plain, packed)


def test_gdn_gate_parameters_start_as_published_and_stay_float32():
    module = GatedDeltaNet(HIDDEN, 1, 64, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert module.A_log[...].dtype == module.dt_bias[...].dtype == F32
    assert module.in_proj_qkvz.weight[...].dtype == jnp.bfloat16
    rates = np.exp(module.A_log[...])
    assert 0 < rates.min() < 2 and 14 < rates.max() < 16
    assert np.all(np.asarray(module.dt_bias[...]) == 1)


def test_gdn_refuses_value_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="num_v_heads=3 must be a multiple of num_k_heads=2"):
        GatedDeltaNet(HIDDEN, 2, 3, rngs=nnx.Rngs(0))


# --- arguments that do not fit


X = np.zeros((2, 3, HIDDEN), np.float32)
LENS = np.array([3, 2], np.int32)
TABLES = np.array([[2, 0, 5], [1, 4, 3]], np.int32)
CACHE = np.zeros((6, PAGE, 36), np.float32)
CONV, SSM = (np.zeros(shape, np.float32) for shape in ((4, 3, 28), (4, 2, 6, 8)))
CALLS = {
    "GatedDeltaNet": (lambda: small_gdn(), dict(x=X)),
    "GatedDeltaNet.prefill": (
        lambda: small_gdn().prefill,
        dict(
            x=X, conv_state=CONV, ssm_state=SSM, state_indices=np.array([3, 0]),
            seq_lens=LENS, query_lens=LENS,
        ),
    ),
    "GatedDeltaNet.decode": (
        lambda: small_gdn().decode,
        dict(x=X, conv_state=CONV, ssm_state=SSM, state_indices=np.array([3, 0])),
    ),
    "MultiHeadLatentAttention": (lambda: small_mla(), dict(x=X)),
    "MultiHeadLatentAttention.prefill": (
        lambda: small_mla().prefill,
        dict(x=X, kv_cache=CACHE, block_tables=TABLES, seq_lens=LENS, query_lens=LENS),
    ),
    "MultiHeadLatentAttention.decode": (
        lambda: small_mla().decode,
        dict(x=X, kv_cache=CACHE, block_tables=TABLES, seq_lens=LENS),
    ),
    "GatedMLP": (lambda: GatedMLP(HIDDEN, 10, rngs=nnx.Rngs(0)), dict(x=X)),
    "RMSNorm": (lambda: RMSNorm(HIDDEN), dict(x=X)),
    "matmul": (lambda: Linear(HIDDEN, 10, rngs=nnx.Rngs(0)), dict(x=X)),
}  # fmt: skip


def refused(name: str, error: type[Exception], words: str, **changed) -> None:
    make, good = CALLS[name]
    call, good = make(), good | changed
    with pytest.raises(error, match=f"^{name}: {words}"):
        call(good.pop("x"), **good)


@pytest.mark.parametrize("name", CALLS)
def test_modules_name_tokens_that_do_not_fit(name):
    refused(name, ValueError, rf"x .*\(2, 3, 7\).*\b{HIDDEN}\b", x=X[..., :7])
    refused(name, TypeError, r"x must be .*got int32 \(2, 3, 24\)", x=X.astype(np.int32))
    for given in (None, [1.0]):
        refused(name, TypeError, f"x must be an array, got {type(given).__name__}", x=given)
    if name.startswith(("Gated", "Multi")) and name != "GatedMLP":
        refused(name, ValueError, r"x .*\(3, 24\)", x=X[0])
    if name.startswith("Multi"):
        refused(name, ValueError, r"x .*none of them empty.*\(0, 3, 24\)", x=X[:0])
        refused(name, ValueError, r"x .*none of them empty.*\(2, 0, 24\)", x=X[:, :0])


@pytest.mark.parametrize("shape", [(0, 3, HIDDEN), (2, 0, HIDDEN)])
def test_no_tokens_give_no_outputs_and_change_no_state(shape):
    x, gdn = jnp.zeros(shape), small_gdn()
    for module in (gdn, GatedMLP(HIDDEN, 10, rngs=nnx.Rngs(0)), RMSNorm(HIDDEN)):
        assert jax.jit(lambda module, x: module(x))(module, x).shape == shape
    assert jax.jit(jax.grad(lambda x: gdn(x).sum()))(x).shape == shape
    slots, lens = np.arange(shape[0]), np.zeros(shape[0], np.int32)
    pools = gdn_pools(0.5, None)
    rows = dict(state_indices=slots, seq_lens=lens, query_lens=lens)
    y, *after = jax.jit(lambda x, *pools: gdn.prefill(x, *pools, **rows))(x, *pools)
    assert y.shape == shape
    jax.tree.map(np.testing.assert_array_equal, after, [*pools])


INDEXED = r"must be integers of shape \[2\], got "


@pytest.mark.parametrize(
    "changed, error, words",
    [
        (dict(state_indices=None), TypeError, f"state_indices {INDEXED}None"),
        (dict(state_indices=[1.0, 2.0]), TypeError, rf"state_indices {INDEXED}float64\[2\]"),
        (dict(state_indices=[1]), ValueError, rf"state_indices {INDEXED}int64\[1\]"),
        (dict(state_indices=[1, 4]), ValueError, r"state_indices must lie in \[-1, 4\)"),
        (dict(state_indices=[1, 1]), ValueError, "state_indices must not name a slot twice"),
        (dict(conv_state=None), TypeError, "conv_state must be an array, got NoneType"),
        (dict(ssm_state=[1.0]), TypeError, "ssm_state must be an array, got list"),
        (dict(conv_state=CONV.astype(int)), TypeError, r"conv_state must be floating, got int64"),
        (dict(conv_state=CONV[..., 1:]), ValueError, r"conv_state must be \[Z, 3, 28\].*4, 3, 27"),
        (dict(conv_state=CONV[:, 1:]), ValueError, r"conv_state must be \[Z, 3, 28\].*4, 2, 28"),
        (dict(ssm_state=SSM[:, :1]), ValueError, r"ssm_state must be \[Z, 2, 6, 8\].*4, 1, 6, 8"),
        (
            dict(conv_state=np.zeros((5, 3, 28), np.float32)),
            ValueError,
            r"conv_state \(5, 3, 28\) and ssm_state \(4, 2, 6, 8\) must have the same number of",
        ),
        (
            dict(conv_state=CONV[None], ssm_state=np.stack([SSM, SSM]), layer=0),
            ValueError,
            r"conv_state \(1, 4, 3, 28\) and ssm_state \(2, .* number of slots and of layers",
        ),
        (dict(layer=0), ValueError, "give layer if and only if"),
    ],
)
@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_gdn_names_slots_and_pools_that_do_not_fit(call, changed, error, words):
    refused(f"GatedDeltaNet.{call}", error, words, **changed)


@pytest.mark.parametrize(
    "changed, error, words",
    [
        (dict(seq_lens=None), TypeError, "seq_lens must be an array, got None"),
        (dict(query_lens=None), TypeError, "query_lens must be an array, got None"),
        (dict(query_lens=LENS * 1.0), TypeError, rf"query_lens {INDEXED}float64\[2\]"),
        (dict(seq_lens=LENS[:1]), ValueError, rf"seq_lens {INDEXED}int32\[1\]"),
        (
            dict(query_lens=jnp.array([4, 0])),
            ValueError,
            r"query_lens \(2,\) holds 4, but x \(2, 3, 24\) has 3 tokens per row",
        ),
        (
            dict(seq_lens=[3, 1]),
            ValueError,
            r"query_lens \(2,\) holds 2 for row 1, but seq_lens, .* holds 1",
        ),
    ],
)
def test_gdn_prefill_names_lengths_that_do_not_fit(changed, error, words):
    refused("GatedDeltaNet.prefill", error, words, **changed)


def test_gdn_prefill_takes_lists_and_does_not_read_the_lengths_of_padding_rows():
    module, (_, good) = small_gdn(), CALLS["GatedDeltaNet.prefill"]
    good = good | dict(x=normal(4, 2, 3, HIDDEN))
    expected = at_once(module.prefill, **good)
    same = dict(state_indices=[3, 0], seq_lens=[3, 2], query_lens=[3, 2])
    listed = at_once(module.prefill, **(good | same))
    jax.tree.map(np.testing.assert_array_equal, listed, expected)
    padded = good | dict(state_indices=[3, -1], seq_lens=[3, 0], query_lens=[3, 9])
    y, *_ = at_once(module.prefill, **padded)
    np.testing.assert_array_equal(y[0], expected[0][0])
    assert not np.any(y[1])


@pytest.mark.parametrize(
    "changed, error, words",
    [
        (dict(seq_lens=None), TypeError, "seq_lens must be an array, got NoneType"),
        (dict(seq_lens=[3.0, 2]), TypeError, r"seq_lens must be integers, got float64 \(2,\)"),
        (dict(query_lens=[3.0, 2]), TypeError, r"query_lens must be integers, got float64"),
        (
            dict(seq_lens=[3, -2]),
            ValueError,
            r"seq_lens \(2,\) holds -2, but lengths must be at least 0",
        ),
        (dict(query_lens=[3, -2]), ValueError, r"query_lens \(2,\) holds -2, but lengths must"),
        (dict(query_lens=LENS + 1), ValueError, r"query_lens \(2,\) holds 4, but x \(2, 3, 24\)"),
        (dict(block_tables=[[0.0], [1]]), TypeError, "block_tables must be integers, got float64"),
        (dict(block_tables=TABLES[:1]), ValueError, r"block_tables .*B = 1, but x .* B = 2"),
        (dict(kv_cache=None), TypeError, "kv_cache must be an array, got NoneType"),
        (dict(layer=1), ValueError, r"kv_cache \(6, 4, 36\) has no axis for layer=1"),
    ],
)
@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_mla_names_the_argument_that_does_not_fit(call, changed, error, words):
    refused(f"MultiHeadLatentAttention.{call}", error, words, **changed)


def test_mla_decode_rotation_names_the_argument_that_does_not_fit():
    module = small_mla()
    with pytest.raises(TypeError, match="decode_rotation: seq_lens must be integers, got float64"):
        module.decode_rotation([3.0, 2], 1)
    with pytest.raises(ValueError, match=r"decode_rotation: query_lens .*B = 1.*B = 2"):
        module.decode_rotation(LENS, 1, LENS[:1])
    for one in (1, np.int64(1), jnp.int32(1)):
        module.decode_rotation(LENS, 2, one)


# --- both, in a user's own model


class Block(nnx.Module):
    """What a user writes: both layers in a model of one's own."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(16, HIDDEN, rngs=rngs)
        self.gdn_norm, self.gdn = RMSNorm(HIDDEN), small_gdn(dtype=jnp.bfloat16)
        self.mla_norm, self.mla = RMSNorm(HIDDEN), small_mla(dtype=jnp.bfloat16)
        self.head = nnx.Linear(HIDDEN, 16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.gdn(self.gdn_norm(x))
        x = x + self.mla(self.mla_norm(x))
        return self.head(x)


@pytest.mark.slow(
    reason="a gradient of 0 or NaN; found by nn/test_training and the finetuning example too"
)
def test_a_users_own_model_with_both_layers_trains():
    model = Block(nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 17), 0, 16)
    losses, grads = train(model, tokens, 20)
    assert losses[-1] < 0.5 * losses[0]
    for path, grad in nnx.to_flat_state(grads):
        assert np.all(np.isfinite(grad[...])) and np.any(grad[...]), path
