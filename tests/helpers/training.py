"""A few training steps of any token model, in the way that a user would write them."""

import jax
import optax
from flax import nnx


def train(model: nnx.Module, tokens: jax.Array, steps: int) -> tuple[list[float], nnx.State]:
    """(the loss before each step, the last step's gradients) for tokens int32 [B, T + 1]."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def loss(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value, grads

    losses = []
    for _ in range(steps):
        value, grads = step(model, optimizer)
        losses.append(float(value))
    return losses, grads
