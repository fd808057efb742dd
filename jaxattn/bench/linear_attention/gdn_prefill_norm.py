"""The last table of `python -m jaxattn.bench gdn`: prefill with the gated norm of its output.

`ms` is the op with its `gate`, the projection q | k | v | z in a layer's layout. `XLA norm ms` is
the op without the gate, followed by `jaxattn.core.numerics.rms_norm.gated_rms_norm` in the same
executable.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.bench.harness.timing import TimedOp, columns, rotation
from jaxattn.bench.linear_attention import gdn_prefill
from jaxattn.bench.linear_attention.gdn_prefill import DIM, FLOP, Shape, moved
from jaxattn.core.dispatch import Implementation
from jaxattn.core.numerics.rms_norm import gated_rms_norm
from jaxattn.ops.gdn.prefill import gated_delta_rule_prefill
from jaxattn.ops.gdn.prefill_options import OutputNorm

SHAPES: tuple[Shape, ...] = ((16, 32, 4, 8192),)
MORE_SHAPES: tuple[Shape, ...] = (
    (2, 8, 1, 32768),
    (8, 32, 4, 2048),
    (16, 32, 1, 8192),
    (16, 32, 1, 32768),
    (16, 32, 8, 1024),
    (16, 64, 4, 8192),
    (16, 16, 1, 32768),
)
SMALL_SHAPES: tuple[Shape, ...] = ((1, 2, 2, 70),)
EPS = 1e-6


def label(shape: Shape) -> dict[str, str]:
    return gdn_prefill.label(shape) | {"output": "normed"}


@functools.partial(jax.jit, static_argnums=0)
def inputs(shape: Shape, seed: int) -> dict[str, Any]:
    """The operands of gdn_prefill.py, a projection whose last columns are z, and a weight."""
    key_heads, value_heads, count, length = shape
    keys = jax.random.split(jax.random.key(seed + 1000))
    width = 2 * (key_heads + value_heads) * DIM
    return {
        **gdn_prefill.inputs(*shape, seed=seed),
        "gate": jax.random.normal(keys[0], (1, count * length, width), jnp.bfloat16),
        "norm_weight": jax.random.uniform(keys[1], (DIM,), minval=0.5, maxval=1.5),
    }


def prefill(shape: Shape, implementation: Implementation | None, *, inside: bool = True) -> TimedOp:
    """The op with the norm `inside` it, or after it."""
    _, value_heads, count, _ = shape

    def call(operands, state, _):
        gate, weight = operands["gate"], operands["norm_weight"]
        rule = {name: x for name, x in operands.items() if name not in ("gate", "norm_weight")}
        out, state = gated_delta_rule_prefill(
            **rule,
            state=state,
            state_indices=jnp.arange(count),
            has_initial_state=jnp.zeros(count, bool),
            implementation=implementation,
            output_norm=OutputNorm(gate=gate, weight=weight, eps=EPS) if inside else None,
        )
        return out if inside else gated_rms_norm(out, gate, weight, EPS), state

    nbytes = moved(*shape) + gate_bytes(shape)
    operands = [inputs(shape, seed) for seed in range(rotation(nbytes))]
    return TimedOp(call, operands, jnp.zeros((count, value_heads, DIM, DIM)))


def gate_bytes(shape: Shape) -> int:
    """Bytes of z."""
    _, value_heads, count, length = shape
    return count * length * value_heads * DIM * 2


def check(op: TimedOp, shape: Shape) -> float:
    """`gdn_prefill.error` against float64, with the norm in float64."""
    operands, out = op.operands[0], op(0)
    weight = np.asarray(operands["norm_weight"], np.float64)
    z = operands["gate"][..., -shape[1] * DIM :].reshape(out.shape)

    def after(o: np.ndarray, z: np.ndarray) -> np.ndarray:
        rms = np.sqrt((o * o).mean(axis=-1, keepdims=True) + EPS)
        return o / rms * weight * z * (1 + np.tanh(z / 2)) / 2

    return gdn_prefill.error({**operands, "z": z}, out, op.state, shape, after)


def measure(
    shape: Shape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table; with `xla` also XLA's time of both."""
    _, value_heads, count, length = shape
    op = prefill(shape, implementation)
    error = check(op, shape)
    if not error < 5e-3:
        raise AssertionError(f"gdn norm {shape}: relative L2 {error} against float64")
    time, _ = times = op.times()
    del op
    apart = prefill(shape, implementation, inside=False).time()
    xla_columns = {"xla ms": prefill(shape, "xla").time() * 1e3} if xla else {}
    return {
        **label(shape),
        **columns("ms", times),
        "XLA norm ms": apart * 1e3,
        **xla_columns,
        "TFLOP/s": FLOP * count * length * value_heads / time / 1e12,
        "GB/s": (moved(*shape) + gate_bytes(shape)) / time / 1e9,
        "relative L2": error,
    }
