"""Both modules in a user's own model: what it was trained to compute is what it decodes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn import Arena, gdn, mla
from jaxattn.nn import GatedDeltaNet, MultiHeadLatentAttention, RMSNorm
from tests.helpers.training import train

HIDDEN, VOCAB, BATCH, TOKENS, PAGE = 32, 16, 2, 12, 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Caches:
    conv: jax.Array
    ssm: jax.Array
    kv: jax.Array
    arena: Arena


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        kwargs = dict(dtype=jnp.float32, rngs=rngs)
        self.embed = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.gdn_norm, self.mla_norm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)
        self.gdn = GatedDeltaNet(HIDDEN, 1, 2, head_k_dim=8, head_v_dim=8, **kwargs)
        self.mla = MultiHeadLatentAttention(
            HIDDEN,
            2,
            kv_lora_rank=32,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            **kwargs,
        )
        self.head = nnx.Linear(HIDDEN, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.gdn(self.gdn_norm(x))
        x = x + self.mla(self.mla_norm(x))
        return self.head(x)

    def caches(self, pages: int) -> Caches:
        spec = mla.scratch(
            batch=BATCH, q_len=1, num_heads=2, kv_lora_rank=32, dtype=jnp.float32, max_pages=pages
        ) | gdn.scratch(batch=BATCH, q_len=1, num_v_heads=2, head_v_dim=8, dtype=jnp.float32)
        return Caches(
            conv=jnp.zeros((BATCH, 3, self.gdn.conv_dim)),
            ssm=jnp.zeros((BATCH, 2, 8, 8)),
            kv=jnp.full((BATCH * pages, PAGE, 40), jnp.nan),  # no token sees what it did not write
            arena=Arena.allocate(spec),
        )

    def decode(self, tokens, caches: Caches, block_tables, seq_lens):
        """Logits of one more token a row."""
        x = self.embed(tokens)
        y, conv, ssm, arena = self.gdn.decode(
            self.gdn_norm(x),
            caches.conv,
            caches.ssm,
            state_indices=jnp.arange(BATCH),
            arena=caches.arena,
        )
        x = x + y
        y, kv, arena = self.mla.decode(
            self.mla_norm(x), caches.kv, block_tables=block_tables, seq_lens=seq_lens, arena=arena
        )
        return self.head(x + y), Caches(conv, ssm, kv, arena)


def trained() -> Model:
    """Three steps, so that no parameter is as it was initialized."""
    model = Model(nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (BATCH, TOKENS + 1), 0, VOCAB)
    losses, grads = train(model, tokens, 3)
    assert losses[2] < losses[0]
    for path, grad in nnx.to_flat_state(grads):
        assert np.all(np.isfinite(grad[...])) and np.any(grad[...]), path
    return model


@pytest.mark.slow(
    reason="a cache that a module's decode reads otherwise; found by the Flax model in "
    "examples/test_examples and by each module's prefill and decode in nn/test_nn and "
    "nn/test_gqa too"
)
def test_a_trained_model_decodes_what_its_training_forward_computes():
    model = trained()
    tokens = jax.random.randint(jax.random.key(1), (BATCH, TOKENS), 0, VOCAB)
    expected = nnx.jit(lambda model: model(tokens))(model)
    pages = -(-TOKENS // PAGE)
    tables = jnp.arange(BATCH * pages).reshape(BATCH, pages)

    @nnx.jit(donate_argnums=2)
    def decode(model, tokens, caches, seq_lens):
        return model.decode(tokens, caches, tables, seq_lens)

    caches = model.caches(pages)
    for t in range(TOKENS):
        donated = caches
        logits, caches = decode(model, tokens[:, t : t + 1], caches, jnp.full(BATCH, t + 1))
        np.testing.assert_allclose(logits[:, 0], expected[:, t], rtol=1e-3, atol=1e-4)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
