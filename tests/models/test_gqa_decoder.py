"""A decoder of delta layers and gated grouped-query attention: its steps are one function."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import Engine, Limits, Request, check_aliasing
from jaxattn.bench.model.roofline import mixer_flops
from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.models.blocks import GDN, GQA, MLP, Block, Stream
from jaxattn.models.caches.layer_cache import CacheSize
from jaxattn.models.catalog.decoder_sizes import DecoderSizes
from jaxattn.models.catalog.param_roles import with_local_heads
from jaxattn.models.interface import DecodeBatch, PrefillBatch, init_state, jit_step, scratch_spec
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.network.decoder_spec import DecoderSpec
from tests.parallel.cases import drawn_params

pytestmark = pytest.mark.lazy_steps

STREAM = Stream(hidden_size=32, eps=1e-6, dtype="float32", param_dtype="float32")
ATTENTION = GQA(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope=RopeConfig(dim=4, theta=1e4, interleaved=False),
    qk_norm=True,
    gated=True,
)
DELTA = GDN(num_k_heads=2, num_v_heads=2, head_k_dim=8, head_v_dim=8)
MLPS = MLP(intermediate_size=40)
PAGE, PAGES, SLOTS, CHUNK, LENGTH = 4, 12, 3, 8, 13
TABLES = np.array([[7, 1, 9, 4], [0, 3, 5, 2], [-1, 99, -7, 2**30]], np.int32)
INDICES = np.array([2, 1, -1], np.int32)
TOKENS = np.random.default_rng(0).integers(0, 48, (2, LENGTH), np.int32)


@cache
def model(stream: Stream = STREAM, *, delta_nets: int = 3, repeats: int = 2) -> DecoderModel:
    repeat = (Block(DELTA, MLPS),) * delta_nets + (Block(ATTENTION, MLPS),)
    blocks = repeat * repeats
    return DecoderModel(
        DecoderSpec(vocab_size=48, stream=stream, blocks=blocks, max_position_embeddings=64)
    )


@cache
def params():
    return model().init_params(jax.random.key(0))


@cache
def forward() -> np.ndarray:
    bound = model().bind(params())
    return np.asarray(jax.jit(lambda tokens: bound(tokens))(TOKENS))


@pytest.mark.slow(
    reason="what an earlier row left; found by the same for folders in test_parity too"
)
def test_chunks_and_decode_continue_the_training_forward_over_dirty_caches():
    held = model().pack(params())
    prefill, decode = jit_step(model().prefill, prefill=True), jit_step(model().decode)
    sizes = CacheSize(pages=PAGES, slots=SLOTS, page_size=PAGE)
    state = init_state(model(), sizes, scratch_spec(model(), 3, max_pages=4, page_size=PAGE))
    state = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state)
    done = np.zeros(3, np.int32)
    for counts in ((5, 8, 0), (4, 0, 0), (0, 2, 0)):
        counts = np.array(counts, np.int32)
        tokens = np.full((3, CHUNK), 11, np.int32)
        for b in range(2):
            tokens[b, : counts[b]] = TOKENS[b, done[b] :][: counts[b]]
        done = done + counts
        lens, indices = np.where(counts, done, 0), np.where(counts, INDICES, -1)
        batch = PrefillBatch(tokens, counts, lens.astype(np.int32), TABLES, indices)
        logits, state = prefill(held, state, batch)
        _check(logits, done, np.flatnonzero(counts))
    for active in ((1, 1, 0), (1, 0, 0), (1, 1, 0)):
        active = np.array(active, np.int32)
        tokens = np.full((3, 1), 11, np.int32)
        for b in np.flatnonzero(active):
            tokens[b] = TOKENS[b, done[b]]
        done = done + active
        lens, indices = np.where(active, done, 0), np.where(active, INDICES, -1)
        batch = DecodeBatch(tokens, lens.astype(np.int32), TABLES, indices)
        logits, state = decode(held, state, batch)
        _check(logits, done, np.flatnonzero(active))


def _check(logits, done, rows) -> None:
    for b in rows:
        wanted = forward()[b, done[b] - 1]
        np.testing.assert_allclose(logits[b], wanted, rtol=5e-5, atol=5e-5)
    for b in {0, 1, 2}.difference(rows.tolist()):
        assert not np.any(logits[b])


def test_a_row_longer_than_its_block_table_is_nan_and_leaves_the_others_as_they_are():
    small = model(delta_nets=1, repeats=1)
    held, decode = jax.device_put(small.pack(drawn_params(small))), jit_step(small.decode)
    sizes = CacheSize(pages=PAGES, slots=SLOTS, page_size=PAGE)
    spec = scratch_spec(small, 3, max_pages=4, page_size=PAGE)
    tokens = np.full((3, 1), 7, np.int32)
    found = []
    for length in (2, 4 * PAGE + 1):
        state = jax.tree.map(lambda x: jnp.full_like(x, 0.25), init_state(small, sizes, spec))
        batch = DecodeBatch(tokens, np.array([length, 3, 0], np.int32), TABLES, INDICES)
        found.append(decode(held, state, batch))
    (fits, _), (logits, state) = found
    assert np.isfinite(fits).all() and np.isnan(logits[0]).all()
    np.testing.assert_array_equal(logits[1:], fits[1:])
    written = np.any(state.array("kv_cache") != 0.25, axis=(0, 2, 3, 4, 5))
    assert set(np.flatnonzero(written)) <= set(TABLES[1].tolist())


@pytest.mark.slow(
    reason="a state or a cache of another dtype; found by an engine of grouped queries over "
    "TurboQuant's codes too"
)
def test_the_engine_says_what_the_training_forward_says():
    bound = jax.jit(lambda tokens: model().bind(params())(tokens))

    def continued(prompt: list[int], count: int) -> list[int]:
        text, padded = list(prompt), np.zeros((1, 16), np.int32)
        for _ in range(count):
            padded[0, : len(text)] = text
            text.append(int(bound(padded)[0, len(text) - 1].argmax()))
        return text[len(prompt) :]

    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7]]
    limits = Limits(batch=2, max_model_len=64, prefill_chunk=8)
    with Engine(model(), params(), limits, strict=True) as engine:
        done = engine.generate([Request(prompt, max_tokens=5) for prompt in prompts])
        for name, step in engine.executables.items():
            # XLA for a CPU copies a small pool that rows and prompts both read; XLA for a GPU does
            # not copy it in Qwen3.5's step.
            exclude = ("conv_state",) if " beside " in name else ()
            check_aliasing(step, slack=0, exclude=exclude)
        assert not engine.seal.counts
        assert engine.implementations["gqa_decode"] == "xla"
    for prompt, completion in zip(prompts, done, strict=True):
        assert list(completion.tokens) == continued(prompt, 5)


def test_norms_stay_float32_in_a_bfloat16_model():
    stream = dataclasses.replace(
        STREAM, dtype="bfloat16", param_dtype="bfloat16", norm_dtype="float32"
    )
    shapes = jax.tree.leaves_with_path(model(stream).param_shapes())
    found = {jax.tree_util.keystr(path): leaf.dtype.name for path, leaf in shapes}
    wide = {name for name, dtype in found.items() if dtype == "float32"}
    of_norms = {
        name
        for name in found
        if any(f"['{part}']" in name for part in ("mlp_norm", "q_norm", "k_norm"))
        or name.startswith("['norm']")
    }
    assert len(of_norms) == 4 + 2 + 1 and of_norms < wide
    assert all("proj" not in name for name in wide)


def test_a_plan_knows_its_lines_sizes_and_what_one_of_two_gpus_has():
    built = DecoderSizes.of("small", model())
    lines = {weights.kind for weights in built.weights}
    assert {"GQA", "GDN", "norms", "dense MLP"} <= lines
    of_gqa = sum(w.parameters for w in built.weights if w.kind == "GQA")
    assert of_gqa == 2 * (32 * 4 * 16 * 2 + 2 * 32 * 2 * 16 + 4 * 16 * 32 + 2 * 16)
    assert built.num_heads == 4 and built.sizes.qk_dim == 16 and built.sizes.state_heads == 2
    [pages] = [c for c in with_local_heads(model(), 2).caches if c.name == "keys and values"]
    assert pages.shapes(CacheSize(pages=3, slots=1))["kv_cache"].shape == (2, 3, 2, 64, 1, 16)


def test_attention_counts_the_pairs_that_a_window_leaves():
    tokens, window = 40, 7
    local = dataclasses.replace(ATTENTION, window=window)
    for mixer in (ATTENTION, local):
        pairs = sum(min(t + 1, mixer.window or tokens) for t in range(tokens))
        assert mixer_flops(mixer, tokens) == 2 * 4 * (16 + 16) * pairs


def test_windows_of_two_sizes_are_two_caches():
    local = dataclasses.replace(ATTENTION, window=5)
    blocks = (Block(local, MLPS), Block(ATTENTION, MLPS)) * 2
    spec = DecoderSpec(vocab_size=48, stream=STREAM, blocks=blocks, max_position_embeddings=64)
    assert [c.name for c in spec.caches] == ["keys and values of the last 5", "keys and values"]
    arrays = [name for c in spec.caches for name in c.shapes(CacheSize(pages=1, slots=1))]
    assert arrays == ["kv_cache_5", "kv_cache"]
