"""Trains a small model that is built from `jaxattn.nn`, and generates text with it.

    python3 examples/finetune.py --steps 60

The example needs optax: `pip install 'jaxattn[train]'`. On an H100 or H200, kernels compute the
gradients of the delta net and of the attention; XLA computes all others (docs/limits.md).
`--data FILE` trains on a text of your own.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxattn.nn import GatedDeltaNet, GatedMLP, MultiHeadLatentAttention, RMSNorm

TEXT = b"""
Peter Piper picked a peck of pickled peppers.
A peck of pickled peppers Peter Piper picked.
If Peter Piper picked a peck of pickled peppers,
where is the peck of pickled peppers Peter Piper picked?
"""


class Layer(nnx.Module):
    """A delta net, an attention layer and an MLP, each with a residual connection."""

    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.norms = nnx.List([RMSNorm(hidden) for _ in range(3)])
        self.parts = nnx.List(
            [
                GatedDeltaNet(hidden, num_k_heads=1, num_v_heads=1, rngs=rngs),
                MultiHeadLatentAttention(hidden, num_heads=2, rngs=rngs),
                GatedMLP(hidden, 2 * hidden, rngs=rngs),
            ]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


class Model(nnx.Module):
    """Maps bytes to logits of the next byte."""

    def __init__(self, hidden: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, hidden, rngs=rngs)
        self.layers = nnx.List([Layer(hidden, rngs) for _ in range(layers)])
        self.norm = RMSNorm(hidden)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            # The backward pass recomputes the activations of a layer: less memory, more time.
            x = nnx.remat(Layer.__call__)(layer, x)
        return self.embed.attend(self.norm(x).astype(jnp.float32))


def crops(text: bytes, rows: int, length: int, key: jax.Array) -> jax.Array:
    """Random pieces of the text, int32 [rows, length + 1]."""
    data = jnp.frombuffer(text, jnp.uint8)
    starts = jax.random.randint(key, (rows, 1), 0, len(text) - length)
    return data[starts + jnp.arange(length + 1)].astype(jnp.int32)


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    def loss(model: Model) -> jax.Array:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


@nnx.jit
def next_token(model: Model, tokens: jax.Array, length: jax.Array) -> jax.Array:
    return model(tokens)[0, length - 1].argmax()


def write(model: Model, prompt: bytes, count: int) -> bytes:
    """Continues a prompt. Each new byte recomputes the whole sequence, which is simple but slow.

    Use caches to serve a model: see examples/flax_model.py.
    """
    text = list(prompt)
    padded = jnp.zeros((1, len(prompt) + count), jnp.int32).at[0, : len(text)].set(jnp.array(text))
    for length in range(len(prompt), len(prompt) + count):
        token = next_token(model, padded, jnp.array(length))
        padded = padded.at[0, length].set(token)
    return bytes(padded[0].tolist())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Trains a small model of bytes.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--data", type=Path, help="a text; without it a rhyme of four lines")
    args = parser.parse_args(argv)
    text = args.data.read_bytes() if args.data else TEXT
    if len(text) < 100:
        parser.error(f"--data {args.data}: {len(text)} bytes are too few, give at least 100")

    model = Model(args.hidden, args.layers, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    for step in range(args.steps):
        tokens = crops(text, 8, 64, jax.random.key(step))
        loss = train_step(model, optimizer, tokens)
        if step == 0 or step == args.steps - 1 or step % 20 == 0:
            print(f"step {step:4}: {loss:.3f} nats per byte")
    print(write(model, text[:12], 24).decode(errors="replace"))


if __name__ == "__main__":
    main()
