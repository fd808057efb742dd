"""Decoding of a delta rule with recent tokens beside the states, checked and timed.

Times are `timing`'s, of the rule alone: `jaxattn.gdn.gated_delta_rule_decode`, or of decays per
channel `jaxattn.kda.kda_decode`. In `us` rows stand at all counts from 0 to 15, so that a sixteenth
of them folds. `in step us` is the mean of 16 steps in which all rows stand at one count. Beside
them, in the same run, the same op without recent tokens.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import gdn, kda
from jaxattn.bench.harness.numpy_reference import relative_l2
from jaxattn.bench.harness.timing import TimedOp, columns, rotation
from jaxattn.bench.linear_attention.delta_rule_decode import BARELY
from jaxattn.core.dispatch import Implementation
from jaxattn.kernels.gdn_decode.recent import PLACES

DIM = 128
# Decays of a head or of channels, B, H
Shape = tuple[str, int, int]
SHAPES: tuple[Shape, ...] = tuple(
    (rule, rows, 32) for rule in ("head", "channel") for rows in (1, 16, 32, 128, 512)
)
MORE_SHAPES: tuple[Shape, ...] = ()
SMALL_SHAPES: tuple[Shape, ...] = (("head", 2, 1), ("channel", 2, 1))


def label(shape: Shape) -> dict[str, str]:
    decays, batch, heads = shape
    return {"decays": decays, "B,H": f"{batch},{heads}"}


@partial(jax.jit, static_argnums=0)
def inputs(shape: Shape, decay: float) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
    """(q, k, v, a or f, b, weights, slots), (state, recent): as many layers as keep states out of
    L2. `decay` is a factor on the rates."""
    rule, batch, heads = shape
    layers = rotation(batch * heads * DIM * DIM * 4, most=32)
    of_decay = (DIM,) if rule == "channel" else ()
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    tokens = (normal(batch, 1, heads, DIM, dtype=jnp.bfloat16) for _ in range(3))
    gates = normal(batch, 1, heads, *of_decay), normal(batch, 1, heads)
    rates = jax.random.uniform(next(keys), (heads,), minval=0.1, maxval=16.0)
    weights = jnp.log(rates * decay), normal(heads, *of_decay)
    slots = jax.random.permutation(next(keys), batch).astype(jnp.int32)
    state = normal(layers, batch, heads, DIM, DIM)
    room = (kda if of_decay else gdn).recent_tokens(batch, heads, heads, layers=layers)
    return (*tokens, *gates, weights, slots), (state, room._replace(decays=room.decays + 1))


def call(shape: Shape, implementation: Implementation | None) -> Any:
    """(operands, (state, recent), layer) -> (out, the same pools); with counts in the operands
    tokens stay beside the states."""
    rule: Any = kda.kda_decode if shape[0] == "channel" else gdn.gated_delta_rule_decode

    def step(operands: Any, pools: Any, layer: Any) -> tuple[Any, Any]:
        (*given, (A_log, dt_bias), slots), filled = operands
        state, recent = pools
        options = {} if filled is None else {"recent": recent, "filled": filled}
        out, *after = rule(
            *given, state, slots, A_log=A_log, dt_bias=dt_bias, layer=layer,
            implementation=implementation, **options,
        )  # fmt: skip
        return out, (after[0], recent if filled is None else after[1])

    return step


def check(shape: Shape, implementation: Implementation | None) -> float:
    """Relative L2 between the states after 16 steps with recent tokens, the last of which folds,
    and those without."""
    given, pools = inputs(shape, 1e-2)
    step = jax.jit(call(shape, implementation))
    found = expected = pools
    for count in range(PLACES):
        filled = jnp.full(shape[1], count, jnp.int32)
        _, found = step((given, filled), found, jnp.int32(0))
        _, expected = step((given, None), expected, jnp.int32(0))
    return relative_l2(found[0][0], np.asarray(expected[0][0], np.float64))


def op(shape: Shape, implementation: Implementation | None, filled: Any) -> TimedOp:
    given, pools = inputs(shape, BARELY)
    return TimedOp(call(shape, implementation), [(given, filled)], pools, layers=pools[0].shape[0])


def measure(
    shape: Shape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """A row of the table. XLA's way is the same for both, and not timed."""
    del xla
    _, batch, heads = shape
    error = check(shape, implementation)
    if not error < 1e-5:
        raise AssertionError(f"recent {shape}: relative error {error} against states of each step")
    with_recent = op(shape, implementation, jnp.arange(batch, dtype=jnp.int32) * 7 % PLACES)
    times = with_recent.times()
    in_step = 0.0
    for count in range(PLACES):
        given, _ = with_recent.operands[0]
        with_recent.operands = [(given, jnp.full(batch, count, jnp.int32))]
        in_step += with_recent.time() / PLACES
    del with_recent
    each = op(shape, implementation, None).time()
    return {
        **label(shape),
        **columns("us", times),
        "in step us": in_step * 1e6,
        "without us": each * 1e6,
        "times": each / times[0],
        "relative error": error,
    }
