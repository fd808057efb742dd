"""DeepSeek Sparse Attention in models: layers without an indexer, shared pages, several GPUs."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxattn.models import CacheSize, DecodeBatch, PrefillBatch
from jaxattn.models.blocks import SparseMLA
from jaxattn.models.catalog.model_resolver import shipped_config
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.interface import init_state, scratch_spec
from jaxattn.models.loading import huggingface_checkpoint
from jaxattn.models.registry import read_model
from jaxattn.models.sharding.axis_sharding import ShardingError, shard_layer
from jaxattn.models.sharding.decoder import divided
from jaxattn.nn import IndexPages, SparseMultiHeadLatentAttention
from jaxattn.parallel import Parallel

TINY = Path(__file__).parents[1] / "data" / "tiny_checkpoints" / "glm_moe_dsa"
PAGE, LINE = 8, 8


def test_a_prompt_that_shares_pages_and_a_row_that_decodes_give_the_reference_logits():
    """In one mixed step, whose first two pages of the prompt another row has written: latents, and
    keys of the indexers. All else in the caches is NaN. A decode step goes on."""
    model, params = huggingface_checkpoint.load(TINY, dtype="float32")
    wanted = safetensors.numpy.load_file(TINY / "reference.safetensors")
    prompt, length = wanted["prompt"][0], int(wanted["lengths"][0])
    spec = scratch_spec(model, 2, max_pages=4, page_size=PAGE)
    state = init_state(model, CacheSize(pages=7, slots=2, page_size=PAGE), spec)
    caches = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.caches)
    state = dataclasses.replace(state, caches=caches)
    tables, other = np.array([[5, 2, 6, 0]], np.int32), np.array([[5, 2, 1, 3]], np.int32)
    params, slot = model.pack(params), np.zeros(1, np.int32)
    slots = np.arange(2, dtype=np.int32)

    @jax.jit
    def step(state, prompts, rows):
        hidden, state = model.mixed_hidden(params, state, prompts, rows)
        ends = jnp.stack([prompts.layout.last[0], prompts.tokens.size])
        return model.head(params, hidden[ends]), state

    def piece(first, table):
        """The prompt from `first` on, in four lines."""
        new, lines = length - first, -(-(length - first) // LINE)
        tokens = np.zeros((4, LINE), np.int32)
        tokens.reshape(-1)[:new] = prompt[first:length]
        lens = np.array([new], np.int32), np.array([length], np.int32)
        owners = np.array([0] * lines + [1] * (4 - lines), np.int32)
        return PrefillBatch(tokens, *lens, table, slot, owners)

    nobody = DecodeBatch(np.zeros((1, 1), np.int32), np.zeros(1, np.int32), tables, slot - 1)
    logits, state = step(state, piece(0, tables), nobody)
    np.testing.assert_allclose(logits[0], wanted["logits"][0, length - 1], atol=1e-4)
    token, lens = wanted["greedy"][:1, None], np.array([length + 1], np.int32)
    logits, state = step(state, piece(2 * PAGE, other), DecodeBatch(token, lens, tables, slot))
    np.testing.assert_allclose(logits[0], wanted["logits"][0, length - 1], atol=1e-4)
    np.testing.assert_allclose(logits[1], wanted["step_logits"][0], atol=1e-4)
    token = np.stack([wanted["greedy"][1:2], wanted["greedy"][:1]])  # of either row
    batch = DecodeBatch(token, np.append(lens + 1, lens), np.concatenate([tables, other]), slots)
    logits, _ = jax.jit(lambda state: model.decode(params, state, batch))(state)
    for row in (0, 1):
        np.testing.assert_allclose(logits[row], wanted["step_logits"][1 - row], atol=1e-4)


def published(name="GLM-5", **changes):
    fields = shipped_config(name) | {"num_hidden_layers": 6} | changes
    return read_model(ConfigFields(fields, "config.json")).model


@pytest.mark.parametrize("fields, letters", [
    ({}, "FFFFFF"),
    (dict(indexer_types=["full", "shared", "full", "full", "shared", "shared"]), "FSFFSS"),
    (dict(index_topk_pattern="FSSFSS"), "FSSFSS"),
    (dict(index_topk_freq=3, index_skip_topk_offset=2), "FFSSFS"),
])  # fmt: skip
def test_the_layers_with_an_indexer_are_read_from_any_spelling(fields, letters):
    """Those of transformers 5.24: `indexer_types`, or what it makes them of."""
    model = published(**fields)
    heads = [block.mixer.index_heads for block in model.spec.blocks]
    assert ["S" if each == 0 else "F" for each in heads] == list(letters)
    assert {cache.name: cache.layers for cache in model.caches} == {
        name: count
        for name, count in (
            ("latents", letters.count("F")), ("latents without indexer", letters.count("S"))
        )
        if count
    }  # fmt: skip


@pytest.mark.parametrize("fields, words", [
    (dict(indexer_types=["shared"] + ["full"] * 5), "indexer_types must begin with a layer that"),
    (dict(index_topk_pattern="SFFFFF"), "index_topk_pattern must begin with a layer that has"),
    (dict(index_topk_pattern="FFXFFF"), "index_topk_pattern must be a list of 6 values, each"),
    (dict(indexer_types=["full"]), "indexer_types must be a list of 6 values"),
    (dict(index_topk_freq=3, index_skip_topk_offset=0), "topk_offset must be an integer from 1"),
    (dict(q_lora_rank=None), "q_lora_rank must be an integer"),
    (dict(index_head_dim=32), "index_head_dim must be at least qk_rope_head_dim=64; got 32"),
    (dict(index_topk=0), "index_topk must be an integer from 1"),
])  # fmt: skip
def test_layers_that_cannot_be_are_refused_by_the_fields_name(fields, words):
    with pytest.raises(ConfigError, match=words):
        published(**fields)


def test_the_indexers_rotation_is_each_familys_own():
    for name, interleaved in (("GLM-5", True), ("DeepSeek-V3.2", False)):
        mixer = published(name).spec.blocks[0].mixer
        assert isinstance(mixer, SparseMLA) and mixer.index_interleaved is interleaved


def test_several_gpus_divide_heads_and_have_each_the_whole_indexer():
    model = published("DeepSeek-V3.2")
    blocks = tuple(
        dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, sinks=True))
        for block in model.spec.blocks
    )
    model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, blocks=blocks))
    local = divided(model, Parallel(tensor=8, expert=8))
    whole, own = (
        {key[-2:]: leaf.shape for key, leaf in nnx.to_flat_state(each.param_shapes())}
        for each in (model, local)
    )
    assert own["q_b_proj", "weight"] != whole["q_b_proj", "weight"]
    assert whole["mixer", "sinks"] == (3, 128) and own["mixer", "sinks"] == (3, 16)
    assert own["wq_b", "weight"] == whole["wq_b", "weight"]
    size = CacheSize(pages=2, slots=1)
    for one, other in zip(model.caches, local.caches, strict=False):
        assert one.shapes(size) == other.shapes(size)
    mixer = model.spec.blocks[0].mixer
    with pytest.raises(ShardingError, match="context=2 .* attention with sinks does not support"):
        shard_layer(mixer, model.spec.stream, Parallel(tensor=8, context=2))


def test_a_cache_in_fp8_has_index_keys_in_fp8_with_a_scale_for_each_token():
    [cache] = published("DeepSeek-V3.2").with_cache_format("fp8_block").caches
    shapes = cache.shapes(CacheSize(pages=3, slots=1))
    tokens = (6, 3, 64)
    assert {name: (x.shape, x.dtype.name) for name, x in shapes.items()} == {
        "kv_cache": ((*tokens, 656), "uint8"),
        "index_cache": ((*tokens, 128), "float8_e4m3fn"),
        "index_scale": (tokens, "float32"),
    }
    lines = {item.name: item.nbytes for item in cache.items(CacheSize(pages=3, slots=1))}
    assert lines["index cache"] == 6 * 3 * 64 * 128 and lines["index scale"] == 6 * 3 * 64 * 4


def layer(**options):
    return SparseMultiHeadLatentAttention(
        32, 2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=8, index_head_dim=12, dtype="float32", rngs=nnx.Rngs(0),
        **({"index_heads": 8, "top_k": 5} | options),
    )  # fmt: skip


def test_a_layer_without_an_indexer_takes_the_choice_of_another():
    first, second = layer(), layer(index_heads=0)
    x = jax.random.normal(jax.random.key(0), (1, 12, 32))
    nnx.update(second, nnx.state(first, lambda path, _: path[0] != "indexer"))

    @jax.jit
    def run(x):
        return second(x, indices=first.choose(x)), first(x)

    np.testing.assert_allclose(*run(x), atol=1e-6)
    with pytest.raises(ValueError, match=r"without an indexer \(index_heads=0\) needs indices="):
        second(x)
    pages = jnp.zeros((4, 16, 24)), IndexPages(jnp.zeros((4, 8, 12)))
    given = dict(block_tables=np.zeros((1, 1), np.int32), seq_lens=np.ones(1, np.int32))
    with pytest.raises(ValueError, match=r"page size of kv_cache \(4, 16, 24\) and keys of 12 dim"):
        first.decode(x[:, :1], pages[0], index=pages[1], **given)
    with pytest.raises(ValueError, match="a layer with an indexer needs index="):
        first.decode(x[:, :1], pages[0], **given)


def test_of_a_table_with_few_places_a_token_attends_to_all_that_it_sees():
    """A chunk, and then two tokens of each row, are those of whole sequences; caches are NaN. One
    head's sink takes all, and one head's is none."""
    own, plain = layer(top_k=64, sinks=True), layer(top_k=64)
    own.sinks[...] = jnp.float32([1e30, -1e30])
    plain.w_uv[...] = plain.w_uv[...].at[0].set(0)
    x = jax.random.normal(jax.random.key(0), (2, 11, 32))
    tables, new = np.array([[1, 3], [2, 0]], np.int32), np.array([9, 7], np.int32)

    @jax.jit
    def run(x):
        pages = jnp.full((5, 8, 24), jnp.nan), IndexPages(jnp.full((5, 8, 12), jnp.nan))
        rows = dict(block_tables=tables, query_lens=new, seq_lens=new)
        first, kv_cache, index, _ = own.prefill(x[:, :9], pages[0], index=pages[1], **rows)
        later = jnp.stack([x[0, 9:11], x[1, 7:9]])
        rows = dict(block_tables=tables, seq_lens=new + 2)
        last, _, _, indices, _ = own.decode(later, kv_cache, index=index, **rows)
        return first, last, indices, own(x), plain(x)

    first, last, indices, whole, without_sinks = run(x)
    np.testing.assert_allclose(whole, without_sinks, atol=1e-6)
    np.testing.assert_array_equal(indices[1, 0], np.where(np.arange(16) < 8, np.arange(16), -1))
    for row, n in enumerate(new):
        np.testing.assert_allclose(first[row, :n], whole[row, :n], atol=1e-6)
        np.testing.assert_allclose(last[row], whole[row, n : n + 2], atol=1e-6)
    assert not np.asarray(first[1, 7:]).any()
