"""Layers of `jaxattn.nn` in a Flax model, with a training forward pass, prefill and decode.

python3 examples/flax_model.py
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxattn.nn import GatedDeltaNet, GatedMLP, MultiHeadLatentAttention, RMSNorm

HIDDEN, PAGE = 64, 16


class Caches(NamedTuple):
    """The caches of the two layers.

    Attributes:
        conv: [slots, 3, channels], the last inputs of the convolution.
        state: float32 [slots, heads, 128, 128], the states of the delta net.
        latents: [pages, 16, 576], the latents of the attention layer.
    """

    conv: jax.Array
    state: jax.Array
    latents: jax.Array


class Model(nnx.Module):
    """Maps bytes to logits of the next byte, with a delta net, an attention layer and an MLP."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, HIDDEN, rngs=rngs)
        self.norms = nnx.List([RMSNorm(HIDDEN) for _ in range(4)])
        self.gdn = GatedDeltaNet(HIDDEN, num_k_heads=1, num_v_heads=1, rngs=rngs)
        self.mla = MultiHeadLatentAttention(HIDDEN, num_heads=2, rngs=rngs)
        self.mlp = GatedMLP(HIDDEN, 2 * HIDDEN, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The forward pass for training: int32 [rows, tokens] to logits [rows, tokens, 256]."""
        x = self.embed(tokens)
        x = x + self.gdn(self.norms[0](x))
        x = x + self.mla(self.norms[1](x))
        return self.head(x)

    def head(self, x: jax.Array) -> jax.Array:
        x = x + self.mlp(self.norms[2](x))
        return self.embed.attend(self.norms[3](x).astype(jnp.float32))

    def caches(self, rows: int, pages: int) -> Caches:
        return Caches(
            conv=jnp.zeros((rows, 3, self.gdn.conv_dim), jnp.bfloat16),
            state=jnp.zeros((rows, 1, 128, 128), jnp.float32),
            latents=jnp.zeros((pages, PAGE, 576), jnp.bfloat16),
        )

    def prefill(self, tokens: jax.Array, caches: Caches, tables: jax.Array, lens: jax.Array):
        """Processes prompts [rows, tokens] of `lens` tokens each, and fills the caches."""
        slots = jnp.arange(len(lens))
        read = dict(seq_lens=lens, query_lens=lens)
        x = self.embed(tokens)
        y, conv, state = self.gdn.prefill(
            self.norms[0](x), caches.conv, caches.state, state_indices=slots, **read
        )
        x = x + y
        y, latents = self.mla.prefill(self.norms[1](x), caches.latents, block_tables=tables, **read)
        return self.head(x + y), Caches(conv, state, latents)

    def decode(self, token: jax.Array, caches: Caches, tables: jax.Array, lens: jax.Array):
        """Processes one token per row, int32 [rows, 1]; `lens` includes this token."""
        slots = jnp.arange(len(lens))
        x = self.embed(token)
        y, conv, state, _ = self.gdn.decode(
            self.norms[0](x), caches.conv, caches.state, state_indices=slots
        )
        x = x + y
        y, latents, _ = self.mla.decode(
            self.norms[1](x), caches.latents, block_tables=tables, seq_lens=lens
        )
        return self.head(x + y), Caches(conv, state, latents)


def main() -> None:
    model = Model(nnx.Rngs(0))
    text = jnp.array([list(b"attention in JAX")], jnp.int32)
    prompt, rest = text[:, :12], text[:, 12:]
    tables = jnp.array([[1, 0]], jnp.int32)  # page 1 first, then page 0

    whole = nnx.jit(lambda model: model(text))(model)
    prefill, decode = nnx.jit(Model.prefill), nnx.jit(Model.decode)
    lens = jnp.array([prompt.shape[1]])
    logits, caches = prefill(model, prompt, model.caches(rows=1, pages=2), tables, lens)
    steps = [logits]
    for token in range(rest.shape[1]):
        lens = lens + 1
        logits, caches = decode(model, rest[:, token, None], caches, tables, lens)
        steps.append(logits)

    error = jnp.linalg.norm(jnp.concatenate(steps, 1) - whole) / jnp.linalg.norm(whole)
    print(f"12 tokens at once and 4 one by one: within {error:.1e} of the whole text's logits")


if __name__ == "__main__":
    main()
