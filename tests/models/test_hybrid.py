"""The hybrid decoder: prefill, chunked prefill, decoding and training are one function."""

import dataclasses
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxattn.core.numerics.rope import RopeConfig, YarnConfig
from jaxattn.engine.startup.memory_plan import page_bytes
from jaxattn.models.embedded.hybrid_config import HybridConfig
from jaxattn.models.embedded.hybrid_model import Hybrid
from jaxattn.models.interface import (
    GRAPHS,
    DecodeBatch,
    PrefillBatch,
    compiler_options,
    jit_step,
    scratch_spec,
)
from tests.helpers import engine_cases
from tests.helpers.fresh_process import said_by_a_fresh_process
from tests.helpers.model_cases import changed, state_of

SMALL = HybridConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    num_repeats=2,
    gdn_per_repeat=1,
    num_attention_heads=2,
    kv_lora_rank=32,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
    rope=RopeConfig(dim=8),
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
    dtype="float32",
    param_dtype="float32",
)
PAGE, PAGES, SLOTS, ROWS, CHUNK, LENGTH = 4, 12, 5, 3, 8, 15


@cache
def step_of(step, config):
    return jit_step(getattr(Hybrid(config), step), prefill=step == "prefill")


params_of = cache(lambda config: Hybrid(config).init_params(jax.random.key(0)))
# Rows 0 and 1 own pages and slots; what row 2 has there must never be used.
TABLES = np.array([[7, 1, 9, 4], [0, 3, 5, 2], [-1, 99, -7, 2**30]], np.int32)
INDICES = np.array([4, 1, -1], np.int32)
TOKENS = np.random.default_rng(0).integers(0, 48, (2, LENGTH), np.int32)


@cache
def forward(config: HybridConfig) -> np.ndarray:
    """The training forward's logits [2, LENGTH, vocab] and what each test is held to."""
    model = Hybrid(config).bind(params_of(config))
    return np.asarray(jax.jit(lambda tokens: model(tokens))(TOKENS))


class Rows:
    """Feeds TOKENS to the steps, a number of tokens a row a call, and returns the logits."""

    def __init__(self, config: HybridConfig, dirt: float = np.nan):
        self.config = config
        self.state = jax.tree.map(
            lambda leaf: jnp.full_like(leaf, dirt),
            state_of(config, ROWS, PAGES, SLOTS, max_pages=TABLES.shape[1], page_size=PAGE),
        )
        self.done = np.zeros(ROWS, np.int32)

    def prefill(self, *counts: int, padding: int = 0) -> np.ndarray:
        counts = np.array([*counts, 0], np.int32)
        tokens = np.full((ROWS, CHUNK), padding, np.int32)
        for b in range(2):
            tokens[b, : counts[b]] = TOKENS[b, self.done[b] :][: counts[b]]
        self.done = self.done + counts
        lens = np.where(counts, self.done, 0)
        indices = np.where(counts, INDICES, -1)
        batch = PrefillBatch(tokens, counts, lens, TABLES, indices)
        step = step_of("prefill", self.config)
        logits, self.state = step(params_of(self.config), self.state, batch)
        return np.asarray(logits)

    def decode(self, *active: int, count: int = 1, padding: int = 0) -> np.ndarray:
        active = np.array([*active, 0], bool)
        tokens = np.full((ROWS, count), padding, np.int32)
        for b in np.flatnonzero(active):
            tokens[b] = TOKENS[b, self.done[b] :][:count]
        self.done = self.done + count * active
        lens, indices = np.where(active, self.done, 0), np.where(active, INDICES, -1)
        batch = DecodeBatch(tokens, lens.astype(np.int32), TABLES, indices)
        step = step_of("decode", self.config)
        logits, self.state = step(params_of(self.config), self.state, batch)
        return np.asarray(logits)


def check(rows: Rows, logits: np.ndarray, which=(0, 1), tolerance: float = 2e-5) -> None:
    for b in which:
        np.testing.assert_allclose(
            logits[b], forward(rows.config)[b, rows.done[b] - 1], rtol=tolerance, atol=tolerance
        )
    for b in {0, 1, 2}.difference(which):
        assert not np.any(logits[b])


# --- one function, four ways


def test_prefill_chunks_and_decode_continue_the_training_forward():
    rows = Rows(SMALL)
    check(rows, rows.prefill(5, 8))
    check(rows, rows.prefill(2, 0), [0])
    check(rows, rows.prefill(1, 3))
    check(rows, rows.decode(1, 1))
    check(rows, rows.decode(1, 0), [0])


@pytest.mark.slow(
    reason="a token that sees the one behind it; found by rows with drafts in "
    "engine/test_speculate and engine/test_draft_head too"
)
def test_a_step_of_two_tokens_continues_the_training_forward():
    rows = Rows(SMALL)
    rows.prefill(5, 8)
    check(rows, rows.decode(1, 1, count=2))


@pytest.mark.slow(
    reason="a segment that another layer decodes; found by chunks and decode against the "
    "training forward too"
)
@pytest.mark.parametrize(
    "changes",
    [
        {
            "tie_embeddings": True,
            "q_lora_rank": 16,
            "linear_num_key_heads": 2,
            "linear_conv_kernel_dim": 2,
            "num_repeats": 1,
            "gdn_per_repeat": 2,
        },
        {"gdn_per_repeat": 0},
    ],
    ids=["two_of_three", "mla_only"],
)
def test_every_shape_of_model_decodes_what_it_trains(changes):
    rows = Rows(dataclasses.replace(SMALL, **changes))
    check(rows, rows.prefill(5, 2))
    check(rows, rows.decode(1, 1))


@pytest.mark.slow(reason="a state or a cache of another dtype; found by bfloat16 of folders too")
def test_bfloat16_follows_its_training_forward_loosely():
    config = dataclasses.replace(SMALL, dtype="bfloat16", param_dtype="bfloat16")
    rows = Rows(config)
    check(rows, rows.prefill(5, 8), tolerance=0.1)
    check(rows, rows.decode(1, 1), tolerance=0.1)
    assert (
        rows.state.array("kv_cache").dtype == rows.state.array("conv_state").dtype == jnp.bfloat16
    )
    assert rows.state.array("ssm_state").dtype == jnp.float32


def test_a_block_scaled_cache_follows_the_training_forward_loosely():
    config = dataclasses.replace(SMALL, gdn_per_repeat=0, kv_lora_rank=128, cache_dtype="uint8")
    rows = Rows(config, dirt=0)
    rows.state = changed(
        rows.state,
        kv_cache=jnp.full_like(rows.state.array("kv_cache"), 0xFF),  # NaN
    )
    state = jax.eval_shape(lambda: state_of(config, ROWS, PAGES, SLOTS, max_pages=4))
    assert state.array("kv_cache").shape == (2, PAGES, 64, 128 + 4 + 16)
    assert state.array("kv_cache").size == page_bytes(Hybrid(config).caches) * PAGES
    for _ in range(3):
        check(rows, rows.decode(1, 1), tolerance=0.1)


def test_prefill_and_decode_leave_the_states_of_a_longer_prefill():
    short, long = Rows(SMALL, dirt=0.0), Rows(SMALL, dirt=0.0)
    short.prefill(5, 6)
    short.decode(1, 1)
    long.prefill(6, 7)
    for name in ("kv_cache", "conv_state", "ssm_state"):
        np.testing.assert_allclose(
            short.state.array(name), long.state.array(name), rtol=2e-5, atol=2e-5
        )


# --- padding, reuse, isolation


def test_real_rows_are_bitwise_the_same_whatever_stands_beside_them():
    alone, beside = Rows(SMALL), Rows(SMALL, dirt=0.25)
    alone.prefill(6, 0), beside.prefill(6, 4, padding=11)
    for n in range(3):
        with_neighbor, without = beside.decode(1, n % 2, padding=7), alone.decode(1, 0)
        np.testing.assert_array_equal(with_neighbor[0], without[0])


def test_a_step_of_padding_alone_writes_nothing_and_returns_zeros():
    rows = Rows(SMALL, dirt=0.25)
    assert not np.any(rows.prefill(0, 0, padding=5))
    assert not np.any(rows.decode(0, 0, padding=5))
    for name in ("kv_cache", "conv_state", "ssm_state"):
        assert np.all(np.asarray(rows.state.array(name)) == 0.25), name


def test_a_row_writes_its_own_pages_and_slots_only():
    rows = Rows(SMALL, dirt=0.25)
    rows.prefill(5, 0)
    rows.decode(1, 0)
    written = ~np.all(np.asarray(rows.state.array("kv_cache")) == 0.25, axis=-1)
    expected = np.zeros_like(written)
    expected[:, 7] = expected[:, 1, :2] = True
    np.testing.assert_array_equal(written, expected)
    for pool in (rows.state.array("conv_state"), rows.state.array("ssm_state")):
        changed = np.any(np.asarray(pool) != 0.25, axis=tuple(range(2, pool.ndim)))
        np.testing.assert_array_equal(changed, np.arange(SLOTS) == np.full((2, 1), 4))


def test_a_nan_in_one_row_stays_in_that_row():
    rows = Rows(SMALL)
    rows.prefill(5, 5)
    rows.state = changed(
        rows.state, ssm_state=rows.state.array("ssm_state").at[0, INDICES[0]].set(jnp.nan)
    )
    logits = rows.decode(1, 1)
    assert np.all(np.isnan(logits[0]))
    np.testing.assert_allclose(logits[1], forward(SMALL)[1, 5], rtol=2e-5, atol=2e-5)


# --- memory


def test_scratch_does_not_grow_with_the_layers():
    one, many = (dataclasses.replace(SMALL, num_repeats=n) for n in (1, 61))
    assert scratch_spec(Hybrid(one), 64, max_pages=16) == scratch_spec(
        Hybrid(many), 64, max_pages=16
    )
    states = [
        jax.eval_shape(lambda c=c: state_of(c, 64, PAGES, SLOTS, max_pages=16)) for c in (one, many)
    ]
    sizes = [[leaf.size for leaf in jax.tree.leaves(state.arena)] for state in states]
    assert sizes[0] == sizes[1]
    assert states[1].array("kv_cache").shape == (61, PAGES, 64, 40)
    assert states[1].array("ssm_state").shape == (61, SLOTS, 2, 16, 8)


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_every_leaf_of_the_state_is_updated_in_place(step):
    state = jax.eval_shape(
        lambda: state_of(SMALL, ROWS, PAGES, SLOTS, max_pages=TABLES.shape[1], page_size=PAGE)
    )
    lens = jnp.zeros(ROWS, jnp.int32)
    if step == "decode":
        batch = DecodeBatch(jnp.zeros((ROWS, 1), jnp.int32), lens, TABLES, INDICES)
    else:
        batch = PrefillBatch(jnp.zeros((ROWS, CHUNK), jnp.int32), lens, lens, TABLES, INDICES)
    compiled = (
        jit_step(getattr(Hybrid(SMALL), step))
        .lower(Hybrid(SMALL).param_shapes(), state, batch)
        .compile()
    )
    donated = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes == donated


def test_what_copies_weights_is_off_on_a_gpu():
    options = compiler_options("gpu")
    assert options["xla_gpu_enable_triton_gemm"] is False
    assert options["xla_gpu_dot_merger_threshold_mb"] == 0
    assert options["xla_disable_hlo_passes"] == "rematerialization"
    assert compiler_options("cpu") is None


def test_only_prefill_records_loops_in_cuda_graphs():
    assert "WHILE" in compiler_options("gpu", prefill=True)[GRAPHS].split(",")
    assert GRAPHS not in compiler_options("gpu")


def test_a_list_in_the_environment_takes_precedence(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--{GRAPHS}=FUSION")
    assert GRAPHS not in compiler_options("gpu", prefill=True)


def test_prefill_records_everything_that_xla_records_by_default():
    said = said_by_a_fresh_process("flags of XLA")  # which adds loops to XLA's list
    found = set(re.findall(f"^{GRAPHS}: (.*)", said, re.MULTILINE))
    assert set(compiler_options("gpu", prefill=True)[GRAPHS].split(",")) == found


def test_the_structure_of_a_large_model_costs_no_memory():
    config = HybridConfig(
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        num_repeats=61,
        num_attention_heads=128,
        q_lora_rank=1536,
        linear_num_key_heads=16,
        linear_num_value_heads=64,
    )
    params = Hybrid(config).param_shapes()
    flat = dict(nnx.to_flat_state(params))
    assert flat["segments", 0, "layers", 3, "mixer", "w_uk"].shape == (61, 128, 128, 512)
    assert flat["segments", 0, "layers", 2, "mixer", "in_proj_qkvz", "weight"].shape == (
        61,
        7168,
        20480,
    )


# --- training and configuration


@pytest.mark.slow(reason="a segment that trains another layer; found by the finetuning example too")
def test_the_scanned_decoder_trains():
    config = dataclasses.replace(SMALL, dtype="bfloat16")
    optimizer = optax.adam(3e-3)
    params = Hybrid(config).init_params(jax.random.key(0))

    @jax.jit
    def step(params, opt_state):
        def loss(params):
            logits = Hybrid(config).bind(params)(TOKENS[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value, grads

    opt_state, losses, grads = optimizer.init(params), [], None
    for _ in range(30):
        params, opt_state, value, grads = step(params, opt_state)
        losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]
    for path, grad in nnx.to_flat_state(grads):
        assert np.all(np.isfinite(grad[...])) and np.any(grad[...]), path


@pytest.mark.slow_cases(reason="kept parameters of other shapes; found by the first of them too")
@pytest.mark.parametrize(
    "config, seed",
    [
        engine_cases.KEPT[0],
        *(pytest.param(*each, marks=pytest.mark.slow) for each in engine_cases.KEPT[1:]),
    ],
)
def test_kept_parameters_are_those_that_are_drawn(config, seed):
    """`python -m tests.helpers.make_tiny_params` writes them again."""
    kept = engine_cases.params_of(config, seed)
    drawn = Hybrid(config).init_params(jax.random.key(seed))
    assert jax.tree.structure(kept) == jax.tree.structure(drawn)
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(drawn), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=2**-7)  # another compiler rounds otherwise


def test_initial_parameters_differ_between_repeats_and_between_keys():
    flat = dict(nnx.to_flat_state(params_of(SMALL)))
    other = dict(nnx.to_flat_state(Hybrid(SMALL).init_params(jax.random.key(1))))
    weight = "segments", 0, "layers", 0, "mlp", "up_proj", "weight"
    assert not np.any(flat[weight][0] == flat[weight][1])
    assert np.mean(flat[weight][...] == other[weight][...]) < 0.01


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 0, "hidden_size must be an integer from 1 to .*; got 0"),
        ("hidden_size", 32.0, "hidden_size must be an integer from 1 to .*; got 32.0"),
        ("q_lora_rank", -4, "q_lora_rank must be an integer from 1 to .*; got -4"),
        ("gdn_per_repeat", -1, "gdn_per_repeat must be an integer from 0 to 63; got -1"),
        ("linear_conv_kernel_dim", 1, "linear_conv_kernel_dim must be an integer from 2 to 64"),
        ("dtype", "float8", "dtype must be one of"),
        ("cache_dtype", "int8", "cache_dtype must be one of .* got 'int8'"),
        ("cache_dtype", "uint8", "multiple of 128, got 32"),
        ("rms_norm_eps", 0.0, "rms_norm_eps must be a number from 1.1.*e-38 to 1; got 0.0"),
        ("tie_embeddings", "no", "tie_embeddings must be true or false; got 'no'"),
        ("rope", RopeConfig(dim=64), "rope.dim=64 must be qk_rope_head_dim=8"),
        ("rope", None, "rope must be a RopeConfig; got None"),
        ("linear_num_key_heads", 3, "linear_num_value_heads=2 must be a multiple"),
    ],
)
def test_a_field_that_does_not_fit_is_named(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **{field: value})


def test_config_survives_its_dict():
    yarn = YarnConfig(factor=4.0, original_max_position_embeddings=128)
    for rope in (SMALL.rope, RopeConfig(dim=8, interleaved=False, yarn=yarn)):
        config = dataclasses.replace(SMALL, rope=rope, q_lora_rank=16)
        assert HybridConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("hidden_size"), "missing field hidden_size"),
        (lambda d: d.update(hiden_size=3), "unknown field hiden_size"),
        (lambda d: d["rope"].update(base=3), r"unknown field rope\.base"),
        (lambda d: d.update(rope=3), "rope must be an object with the fields of RopeConfig"),
        (lambda d: d["rope"].update(yarn={"factor": 2}), r"missing field rope\.yarn\.original"),
    ],
)
def test_a_dict_that_does_not_fit_names_the_field(change, message):
    values = SMALL.to_dict()
    change(values)
    with pytest.raises(ValueError, match=message):
        HybridConfig.from_dict(values)


@pytest.mark.slow(
    reason="a column of zeros that counts; found by the columns of KDA's b in models/test_kimi too"
)
def test_odd_widths_get_columns_of_zeros_that_change_nothing():
    """In bfloat16, whose products have a kernel with steps of 64; gates have a tile of 128."""
    config = dataclasses.replace(SMALL, dtype="bfloat16", param_dtype="bfloat16")
    params = params_of(config)
    packed = Hybrid(config).pack(params)
    layer = packed.params["segments"][0]["layers"][0]
    widths = {
        name: layer[part][name]["weight"].shape[axis]
        for part, name, axis in (
            ("mlp", "gate_proj", 2), ("mlp", "up_proj", 2), ("mlp", "down_proj", 1),
            ("mixer", "in_proj_ba", 2),
        )
    }  # fmt: skip
    assert widths.pop("in_proj_ba") == 128
    assert set(widths.values()) == {64}
    assert not np.asarray(layer["mlp"]["up_proj"]["weight"][..., 40:]).any()
    lens = np.full(2, CHUNK, np.int32)
    batch = PrefillBatch(TOKENS[:, :CHUNK], lens, lens, TABLES[:2], INDICES[:2])
    found = []
    for given in (params, packed):
        state = state_of(config, 2, PAGES, SLOTS, max_pages=TABLES.shape[1], page_size=PAGE)
        found.append(step_of("prefill", config)(given, state, batch)[0])
    np.testing.assert_allclose(*found, atol=2e-2)


def test_packed_vectors_give_the_same_bits():
    params = params_of(SMALL)
    packed = Hybrid(SMALL).pack(params)
    held = jax.tree.leaves((packed.params, packed.vectors))
    assert sum(leaf.size for leaf in held) == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert packed.weights["delta"].shape[0] == SMALL.num_gdn_layers
    batch = DecodeBatch(np.ones((ROWS, 1), np.int32), np.ones(ROWS, np.int32), TABLES, INDICES)
    (plain, plain_state), (logits, logits_state) = (
        step_of("decode", SMALL)(held, Rows(SMALL, dirt=0).state, batch)
        for held in (params, packed)
    )
    np.testing.assert_array_equal(plain, logits)
    jax.tree.map(np.testing.assert_array_equal, plain_state, logits_state)
