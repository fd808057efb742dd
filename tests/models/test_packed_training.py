"""A decoder's training forward over rows that hold several sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.models.blocks import MLP, Block, Mixer, Stream
from jaxattn.models.embedded.hybrid_config import HybridConfig
from jaxattn.models.embedded.hybrid_model import Hybrid
from jaxattn.models.network.decoder_layer import DecoderLayer

CONFIG = HybridConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=16,
    num_repeats=2,
    gdn_per_repeat=1,
    num_attention_heads=1,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=8,
    rope=RopeConfig(dim=4),
    linear_num_value_heads=1,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    dtype="float32",
    param_dtype="float32",
)
LENGTHS = (5, 1, 6)
TOKENS = np.random.default_rng(0).integers(0, 16, sum(LENGTHS) + 2).astype(np.int32)
ENDS = np.cumsum([0, *LENGTHS])
MODEL = Hybrid(CONFIG)
STREAM = Stream(hidden_size=16, eps=1e-6, dtype="float32", param_dtype="float32")


@functools.cache
def params():
    return MODEL.init_params(jax.random.key(0))


def loss_of(params, tokens, counts, saved=None, **packed):
    """The sum over tokens that have one of their own sequence behind them."""
    logits = MODEL.bind(params)(tokens, saved=saved, **packed)
    chances = jax.nn.log_softmax(logits)[:, :-1]
    found = jnp.take_along_axis(chances, tokens[:, 1:, None], axis=-1)[..., 0]
    return -jnp.where(counts, found, 0).sum()


def of_sequences_alone():
    """The loss and its gradients of a row for each sequence, with zeros behind it."""
    each = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    rows = np.zeros(each.shape, np.int32)
    rows[each] = TOKENS[: ENDS[-1]]
    return jax.jit(jax.value_and_grad(lambda params: loss_of(params, rows, each[:, 1:])))(params())


def test_a_packed_batch_has_the_loss_and_gradients_of_its_sequences():
    ids = np.repeat([0, 1, 2, 3], [*LENGTHS, 2])
    wanted, tokens = of_sequences_alone(), TOKENS[None]
    counts = (ids[1:] == ids[:-1]) & (ids[1:] < 3)
    options = {"segment_ids": ids[None], "saved": jax.checkpoint_policies.nothing_saveable}
    run = jax.value_and_grad(lambda params: loss_of(params, tokens, counts[None], **options))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5),
        jax.jit(run)(params()), wanted,
    )  # fmt: skip


@pytest.mark.slow(reason="layers have offsets of their own; the model hands them on")
def test_offsets_are_segments_too():
    network, ids = MODEL.bind(params()), np.repeat([0, 1, 2, 3], [*LENGTHS, 2])[None]
    found = jax.jit(lambda tokens: network(tokens, cu_seqlens=ENDS))(TOKENS[None])
    wanted = jax.jit(lambda tokens: network(tokens, segment_ids=ids))(TOKENS[None])
    np.testing.assert_allclose(found[:, : ENDS[-1]], wanted[:, : ENDS[-1]], rtol=1e-4, atol=1e-5)


def test_positions_turn_attention_alone():
    network = MODEL.bind(params())
    run = jax.jit(lambda positions: network(TOKENS[None], positions=positions))
    places = np.arange(len(TOKENS))[None]
    plain = run(places)
    np.testing.assert_allclose(run(places + 7), plain, rtol=1e-3, atol=1e-4)
    assert np.abs(run(2 * places) - plain).max() > 1e-3


class Outside(Mixer):
    """A mixer of a user's, whose module is one of the package's."""

    cache_name, kernels = "outside", {}
    cache = scratch = decode = None

    def build(self, stream, rngs):
        return MODEL.spec.blocks[-1].mixer.build(stream, rngs)


def test_a_users_mixer_of_attention_gets_positions():
    layer = DecoderLayer(Block(Outside(), MLP(intermediate_size=8)), STREAM, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 6, 16))
    run = jax.jit(lambda positions: layer(x, {"positions": positions})[0])
    plain, far = run(np.arange(6)[None]), run(3 * np.arange(6)[None])
    assert np.abs(far - plain).max() > 1e-3


def test_a_layer_names_what_does_not_fit():
    with pytest.raises(ValueError, match="GatedDeltaNet: segment_ids must not decrease"):
        MODEL.bind(params())(TOKENS[None], segment_ids=TOKENS[None])
