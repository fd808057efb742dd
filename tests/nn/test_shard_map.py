"""Inside `jax.shard_map`, its checks on, every op and module gives what it gives on one device.

The mesh has two devices where there are two (`JAX_NUM_CPU_DEVICES=2`), else one, which has the same
checks. Each device has its own batch and its own caches or pools, and shares the weights. Kernels
need the checks off.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn import gdn, gqa, mla
from jaxattn.core.numerics.rope import RopeConfig, rotation
from jaxattn.core.validation.varying_axes import match_varying_axes
from jaxattn.nn import GatedDeltaNet, GatedMLP, Linear, MultiHeadLatentAttention
from jaxattn.ops.gdn import causal_conv1d
from jaxattn.ops.gdn.layer_decode import gated_delta_net_decode
from jaxattn.ops.gdn.prefill import gated_delta_rule_prefill
from jaxattn.ops.gqa import decode as gqa_decode
from jaxattn.ops.gqa import prefill as gqa_prefill
from jaxattn.ops.linear.rms_norm import rms_norm_layer
from jaxattn.ops.mla import decode
from jaxattn.ops.mla.append import mla_append
from tests.helpers.draws import normals
from tests.helpers.every_op import OPS, arguments
from tests.helpers.kernel_cases import slow

P = jax.P
DEVICES = min(2, jax.device_count())
BATCH, PAGE, HIDDEN = 2, 4, 24


def mesh():
    return jax.make_mesh((DEVICES,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))


def normal(seed, *shape):
    return normals(seed)(*shape)


def each(seed, *shape):
    """One array for each device, on the first axis."""
    return normal(seed, DEVICES, *shape)


def ints(*rows):
    """Each device's integers: the rows of the first, then of the second."""
    return jnp.array(rows, jnp.int32)[:DEVICES]


def on_one_device(op, shared, own):
    def device(i):
        return op(**shared, **jax.tree.map(lambda x: x[i], own))

    return jax.tree.map(lambda *parts: jnp.stack(parts), *map(device, range(DEVICES)))


def on_a_mesh(op, shared, own):
    def device(shared, own):
        out = op(**shared, **jax.tree.map(lambda x: x[0], own))
        return jax.tree.map(lambda x: x[None], out)

    return jax.shard_map(device, mesh=mesh(), in_specs=(P(), P("b")), out_specs=P("b"))(shared, own)


def assert_same(a, b):
    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

    jax.tree.map(close, a, b)


def check(op, shared, own):
    """The same outputs; under jit, as `shard_map` is used."""
    one, mesh = (
        jax.jit(functools.partial(run, op))(shared, own) for run in (on_one_device, on_a_mesh)
    )
    assert_same(one, mesh)


def check_with_gradients(op, shared, own):
    """The same outputs, and the same gradients of every float operand, shared ones included."""
    operands, tree = jax.tree.flatten((shared, own))
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in operands]

    def value_and_gradients(run):
        def loss(values):
            values = iter(values)
            mixed = [next(values) if f else x for x, f in zip(operands, floats, strict=True)]
            out = run(op, *jax.tree.unflatten(tree, mixed))
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out)), out

        values = [x for x, f in zip(operands, floats, strict=True) if f]
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(values)

    one, mesh = value_and_gradients(on_one_device), value_and_gradients(on_a_mesh)
    assert any(np.any(np.asarray(x)) for x in one[1])
    assert_same(one, mesh)


# --- GQA


@pytest.mark.slow_cases(
    reason="an operand that is not made to vary; found by shared operands of decode too"
)
@pytest.mark.parametrize(
    "shared, call",
    [
        slow("nothing", "gqa_decode"),
        slow("nothing", "gqa_prefill"),
        slow("nothing", "gqa_attention"),
        ("cache and sinks", "gqa_decode"),
        slow("cache and sinks", "gqa_prefill"),
        slow("cache and sinks", "gqa_attention"),
    ],
)
def test_gqa_where_devices_read_different_numbers_of_blocks(call, shared, monkeypatch):
    blocks = ((gqa_decode, "DECODE_BLOCK"), (gqa_prefill, "PREFIX_BLOCK"))
    for module, name in (*blocks, (gqa_prefill, "QUERY_BLOCK")):
        monkeypatch.setattr(module, name, PAGE)
    tokens = 2 if call == "gqa_decode" else 5
    own = dict(q=each(0, BATCH, tokens, 4, 8), gate=each(1, BATCH, tokens, 4, 8))
    given = dict(sinks=normal(2, 4))
    if call != "gqa_decode":
        own |= dict(k=each(3, BATCH, tokens, 2, 8), v=each(4, BATCH, tokens, 2, 8))
    if call != "gqa_attention":
        own |= paged()
        given |= dict(kv_cache=normal(5, 6, 2, PAGE, 2, 8))
    if call == "gqa_prefill":
        own |= dict(query_lens=ints([5, 2], [3, 1]))
    if shared == "nothing":
        own |= {name: jnp.stack([x, 1 - x])[:DEVICES] for name, x in given.items()}
        given = {}
    check_with_gradients(functools.partial(getattr(gqa, call), window=6), given, own)


# --- MLA


def paged():
    """Rows of a cache; the second device's are shorter."""
    return dict(
        block_tables=ints([[1, 3, 5], [0, 2, -1]], [[2, 4, -1], [3, 1, -1]]),
        seq_lens=ints([11, 6], [3, 4]),
    )


@pytest.mark.slow_cases(reason="an operand that is not made to vary; found by a shared cache too")
@pytest.mark.parametrize("cache", [slow("own"), "shared"])
def test_mla_decode_where_devices_read_different_numbers_of_blocks(cache, monkeypatch):
    monkeypatch.setattr(decode, "DECODE_BLOCK", PAGE)
    op = functools.partial(mla.mla_decode, scale=0.3, kv_lora_rank=8)
    own = paged() | dict(q=each(0, BATCH, 2, 3, 12))
    if cache == "own":
        check_with_gradients(op, {}, own | dict(kv_cache=each(1, 6, PAGE, 12)))
    else:
        check_with_gradients(op, dict(kv_cache=normal(1, 6, PAGE, 12)), own)


def test_mla_prefill():
    op = functools.partial(mla.mla_prefill, scale=0.3, block=PAGE)
    shared = dict(w_uk=normal(1, 3, 5, 8), w_uv=normal(2, 3, 8, 6))
    own = paged() | dict(
        q=each(3, BATCH, 3, 3, 9),
        latent=each(4, BATCH, 3, 12),
        kv_cache=each(5, 6, PAGE, 12),
        query_lens=ints([3, 3], [3, 3]),
    )
    check_with_gradients(op, shared, own)


def test_causal_attention():
    own = dict(q=each(0, BATCH, 5, 2, 8), k=each(1, BATCH, 5, 2, 8), v=each(2, BATCH, 5, 2, 4))
    check_with_gradients(functools.partial(mla.causal_attention, scale=0.3), {}, own)


def test_merge_attention_states():
    own = dict(outs=each(0, 3, BATCH, 4), lses=each(1, 3, BATCH))
    check_with_gradients(mla.merge_attention_states, {}, own)


def test_mla_cache_write():
    own = paged() | dict(latent=each(0, BATCH, 2, 12))
    check(mla.mla_cache_write, {}, own | dict(kv_cache=each(1, 6, PAGE, 12)))
    check(mla.mla_cache_write, dict(kv_cache=normal(1, 6, PAGE, 12)), own)


def test_mla_append():
    config = RopeConfig(dim=4)

    def op(seq_lens, **operands):
        angles = rotation(seq_lens[:, None], config)
        return mla_append(seq_lens=seq_lens, rotation=angles, config=config, **operands)

    own = paged() | dict(
        kv=each(0, BATCH, 1, 12), q=each(1, BATCH, 1, 6), kv_cache=each(2, 6, PAGE, 12)
    )
    check(op, dict(weights=normal(3, 18)), own)


def test_rms_norm_layer():
    op = functools.partial(rms_norm_layer, layer=1)
    check_with_gradients(op, dict(weights=normal(0, 2, 8)), dict(x=each(1, BATCH, 8)))


# --- gated delta rule


def sequences(tokens, batch=BATCH):
    return dict(
        q=each(0, batch, tokens, 1, 8),
        k=each(1, batch, tokens, 1, 8),
        v=each(2, batch, tokens, 2, 6),
        g=-jnp.abs(each(3, batch, tokens, 2)),
        beta=jax.nn.sigmoid(each(4, batch, tokens, 2)),
    )


RULES = {
    "chunk": functools.partial(gdn.chunk_gated_delta_rule, chunk_size=16),
    "recurrent": gdn.recurrent_gated_delta_rule,
}


@pytest.mark.slow_cases(
    reason="an operand that is not made to vary; found by sequences and shared operands "
    "of the chunked rule too"
)
@pytest.mark.parametrize(
    "rule, given",
    [
        ("chunk", "sequences"),
        slow("chunk", "packed"),
        ("chunk", "shared"),
        slow("recurrent", "sequences"),
        slow("recurrent", "packed"),
        slow("recurrent", "shared"),
    ],
)
def test_gated_delta_rule(rule, given):
    op = functools.partial(RULES[rule], use_qk_l2norm=True, output_final_state=True)
    shared, own = {}, sequences(20)
    if given == "packed":
        own = sequences(20, batch=1) | dict(cu_seqlens=ints([0, 3, 20], [0, 17, 19]))
    elif given == "shared":
        shared = dict(k=own.pop("k")[0], initial_state=normal(5, BATCH, 2, 6, 8))
    check_with_gradients(op, shared, own)


@pytest.mark.slow_cases(
    reason="an operand that is not made to vary; found by packed sequences with a shared pool too"
)
@pytest.mark.parametrize(
    "packed, pool",
    [slow(False, "shared"), slow(True, "own"), (True, "shared")],
)
def test_gated_delta_rule_prefill(packed, pool):
    op = functools.partial(gated_delta_rule_prefill, chunk_size=16)
    own = sequences(20, batch=1) | dict(cu_seqlens=ints([0, 3, 20], [0, 17, 19]))
    own = own if packed else sequences(20)
    kept = gdn.Checkpoints(slots=ints([[2], [0]], [[1], [3]]), tokens=16)
    own |= dict(state_indices=ints([1, 4], [0, 2]), checkpoints=kept)
    if pool == "own":
        check(op, {}, own | dict(state=each(5, 6, 2, 6, 8)))
    else:
        check(op, dict(state=normal(5, 6, 2, 6, 8)), own)


def test_gated_delta_rule_decode():
    own = sequences(2) | dict(state=each(5, 4, 2, 6, 8), state_indices=ints([1, 3], [2, 0]))
    own |= dict(a=own.pop("g"), b=own.pop("beta"))
    shared = dict(A_log=normal(6, 2), dt_bias=normal(7, 2))
    check(gdn.gated_delta_rule_decode, shared, own)


def test_gated_delta_net_decode():
    own = dict(
        qkvz=each(0, BATCH, 2, 40),
        ba=each(1, BATCH, 2, 4),
        conv_state=each(2, 4, 3, 28),
        state=each(3, 4, 2, 6, 8),
        state_indices=ints([1, 3], [2, -1]),
    )
    check(gated_delta_net_decode, dict(weights=normal(4, 2 * 2 + 6 + 4 * 28)), own)


def test_convolution():
    shared = dict(weight=normal(0, 5, 4), bias=normal(1, 5))
    check_with_gradients(causal_conv1d.causal_conv1d, shared, dict(x=each(2, BATCH, 7, 5)))
    packed = dict(x=each(2, 1, 7, 5), cu_seqlens=ints([0, 3, 7], [0, 6, 6]))
    check_with_gradients(causal_conv1d.causal_conv1d, shared, packed)
    own = dict(x=each(2, BATCH, 2, 5), state_indices=ints([1, 3], [2, -1]))
    check(causal_conv1d.causal_conv1d_update, shared, own | dict(conv_state=each(3, 4, 3, 5)))


def test_states_of_a_pool():
    def op(pool, state_indices):
        states = causal_conv1d.state_read(pool, state_indices)
        return states, causal_conv1d.state_write(pool, 2 * states, state_indices)

    slots = dict(state_indices=ints([1, 3], [2, -1]))
    check(op, {}, slots | dict(pool=each(0, 4, 5)))
    check(op, dict(pool=normal(0, 4, 5)), slots)


# --- modules


def small_mla():
    sizes = dict(kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
    kwargs = dict(rope=RopeConfig(dim=4), dtype=jnp.float32, rngs=nnx.Rngs(1))
    return MultiHeadLatentAttention(HIDDEN, 3, q_lora_rank=16, **kwargs, **sizes)


def small_gdn():
    kwargs = dict(head_k_dim=8, head_v_dim=6, dtype=jnp.float32, rngs=nnx.Rngs(2))
    return GatedDeltaNet(HIDDEN, 1, 2, **kwargs)


MODULES = {
    "Linear": lambda: Linear(HIDDEN, 5, dtype=jnp.float32, rngs=nnx.Rngs(0)),
    "GatedMLP": lambda: GatedMLP(HIDDEN, 8, dtype=jnp.float32, rngs=nnx.Rngs(0)),
    "MultiHeadLatentAttention": small_mla,
    "GatedDeltaNet": small_gdn,
}


@pytest.mark.slow_cases(
    reason="an operand that is not made to vary; found by gradients of the rule, the convolution "
    "and causal attention there, and by serving of both modules, too"
)
@pytest.mark.parametrize(
    "module", ["Linear", "GatedMLP", slow("MultiHeadLatentAttention"), slow("GatedDeltaNet")]
)
def test_data_parallel_training(module):
    graphdef, weights = nnx.split(MODULES[module]())

    def op(weights, x):
        return nnx.merge(graphdef, weights)(x)

    check_with_gradients(op, dict(weights=weights), dict(x=each(3, BATCH, 6, HIDDEN)))


def test_a_layer_whose_weights_are_split_and_whose_tokens_are_shared():
    graphdef, weights = nnx.split(MODULES["Linear"]())
    weights = jax.tree.map(lambda x: jnp.stack([x, -2 * x])[:DEVICES], weights)

    def op(weights, x):
        return nnx.merge(graphdef, weights)(x)

    check_with_gradients(op, dict(x=normal(3, BATCH, 6, HIDDEN)), dict(weights=weights))


@pytest.mark.parametrize("tokens", ["prefill", "decode"])
def test_serving_of_mla(tokens):
    graphdef, weights = nnx.split(small_mla())

    def op(weights, x, **operands):
        return getattr(nnx.merge(graphdef, weights), tokens)(x, **operands)[:2]

    own = paged() | dict(x=each(3, BATCH, 3, HIDDEN), kv_cache=each(4, 6, PAGE, 36))
    own |= dict(query_lens=ints([3, 2], [3, 3]))
    check(op, dict(weights=weights), own)


@pytest.mark.parametrize("tokens", ["prefill", "decode"])
def test_serving_of_gdn(tokens):
    graphdef, weights = nnx.split(small_gdn())

    def op(weights, x, **operands):
        return getattr(nnx.merge(graphdef, weights), tokens)(x, **operands)[:3]

    own = dict(
        x=each(3, BATCH, 3, HIDDEN),
        conv_state=each(4, 4, 3, 28),
        ssm_state=each(5, 4, 2, 6, 8),
        state_indices=ints([1, 3], [2, -1]),
    )
    if tokens == "prefill":
        own |= dict(query_lens=ints([3, 2], [1, 3]), seq_lens=ints([7, 2], [3, 5]))
    check(op, dict(weights=weights), own)


# --- kernels, which need shard_map's checks off


def alike_on_gpus(op, shared, own, bound):
    """Each device's own batch by the kernel gives what XLA gives on one device."""

    def device(shared, own):
        out = op(**shared, **jax.tree.map(lambda x: x[0], own), implementation="mosaic_gpu")
        return jax.tree.map(lambda x: x[None], out)

    specs = dict(in_specs=(P(), P("b")), out_specs=P("b"), check_vma=False)
    outs = jax.jit(jax.shard_map(device, mesh=mesh(), **specs))(shared, own)
    expected = on_one_device(functools.partial(op, implementation="xla"), shared, own)
    for actual, exact in zip(jax.tree.leaves(outs), jax.tree.leaves(expected), strict=True):
        actual, exact = (np.asarray(x, np.float64) for x in (actual, exact))
        assert np.linalg.norm(actual - exact) <= bound * np.linalg.norm(exact)


@pytest.mark.gpu
def test_mla_decode_on_gpus():
    op = functools.partial(mla.mla_decode, scale=576**-0.5, kv_lora_rank=512)
    cache = each(1, 6, 64, 576).astype(jnp.bfloat16)
    own = dict(
        q=each(0, BATCH, 1, 16, 576).astype(jnp.bfloat16),
        block_tables=ints([[1, 3, 5], [0, 2, -1]], [[2, 4, -1], [3, 1, -1]]),
        seq_lens=ints([170, 100], [70, 65]),
    )
    alike_on_gpus(op, {}, own | dict(kv_cache=cache), 1e-2)
    alike_on_gpus(op, dict(kv_cache=cache[0]), own, 1e-2)


@pytest.mark.gpu
def test_gated_delta_net_decode_on_gpus():
    channels = 4 * 128
    own = dict(
        qkvz=each(0, BATCH, 1, channels + 2 * 128),
        ba=each(1, BATCH, 1, 4),
        conv_state=each(2, 4, 3, channels),
        state=each(3, 4, 2, 128, 128),
        state_indices=ints([1, 3], [2, -1]),
    )
    weights = normal(4, 2 * 2 + 128 + 4 * channels)
    alike_on_gpus(gated_delta_net_decode, dict(weights=weights), own, 1e-4)


# --- outside


def test_nothing_is_added_outside_of_shard_map_and_without_its_checks():
    def step(x, y):
        return match_varying_axes((x, None, 3), y)[0] + 1

    x, y = normal(0, 4), normal(1, DEVICES)
    assert match_varying_axes(x, y) is x
    assert len(jax.make_jaxpr(step)(x, y).eqns) == 1
    unchecked = jax.shard_map(
        step, mesh=mesh(), in_specs=(P(), P("b")), out_specs=P("b"), check_vma=False
    )
    assert "pvary" not in str(jax.make_jaxpr(unchecked)(x, y))


# --- a mesh as jax.make_mesh makes it

OF_THE_BATCH = ("q", "k", "v", "g", "beta", "a", "b", "x", "kv", "latent", "qkvz", "ba", "values")
OF_THE_BATCH += ("gate", "block_tables", "seq_lens", "query_lens", "state_indices")
# Ops that address pages or slots, and the chunks' inverses; and which of them a module calls first.
REFUSING = {
    "MultiHeadLatentAttention.prefill": "mla_cache_write",
    "MultiHeadLatentAttention.decode": "mla_append",
    "GroupedQueryAttention.prefill": "gqa_cache_write",
    "GroupedQueryAttention.decode": "gqa_append",
    "GatedDeltaNet": "chunk_gated_delta_rule",
    "GatedDeltaNet.prefill": "state_read",
    "GatedDeltaNet.decode": "gated_delta_net_decode",
    "KimiDeltaAttention": "chunk_kda",
    "KimiDeltaAttention.prefill": "state_read",
    "KimiDeltaAttention.decode": "kimi_delta_attention_decode",
}
for refusing in (
    *("mla_decode", "mla_prefill", "mla_cache_write", "mla_append", "mla.decode_schedule"),
    *("gqa_decode", "gqa_prefill", "gqa_cache_write"),
    *("chunk_gated_delta_rule", "gated_delta_rule_prefill", "gated_delta_rule_decode"),
    *("gated_delta_net_decode", "causal_conv1d_update", "state_read", "state_write"),
    *("chunk_kda", "kda_prefill", "kda_decode", "kimi_delta_attention_decode"),
):
    REFUSING[refusing] = refusing


def placed(name, mesh):
    """The op's arguments, those of the batch split over the mesh; and the others."""
    given = arguments(name)
    split = {key: given.pop(key) for key in OF_THE_BATCH if key in given}
    return jax.device_put(split, jax.NamedSharding(mesh, P("b"))), given


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in OPS if "scratch" not in name])
def test_explicit_axes_work_or_are_refused_by_name(name):
    split, rest = placed(name, jax.make_mesh((DEVICES,), ("b",)))

    def op(split):
        return OPS[name](**split, **rest)

    if name not in REFUSING:
        jax.eval_shape(op, split)
        return
    words = "of type Explicit, .* pass axis_types=.*Auto.* to jax.make_mesh, or call .* inside"
    with pytest.raises(TypeError, match=rf"^{REFUSING[name]}: .*axis 'b' {words}"):
        jax.eval_shape(op, split)
    split, rest = placed(name, mesh())
    jax.eval_shape(op, split)  # over Auto axes it is traced


@pytest.mark.parametrize(
    "name", ["mla_decode", "mla_cache_write", "gqa_decode", "gqa_prefill", "chunk_gated_delta_rule"]
)
def test_shard_map_over_explicit_axes_of_arrays_that_lie_on_them(name):
    explicit = jax.make_mesh((DEVICES,), ("b",))
    split, rest = placed(name, explicit)

    def op(split):
        outs = OPS[name](**split, **rest)
        return jax.tree.map(lambda x: x[None], outs)

    specs = dict(in_specs=(P("b"),), out_specs=P("b"))
    jax.eval_shape(jax.jit(jax.shard_map(op, mesh=explicit, **specs)), split)
