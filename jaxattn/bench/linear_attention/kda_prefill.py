"""Chunked prefill of Kimi's delta rule, checked and timed by the method of gdn_prefill.py.

`gdn ms` is the time of the gated delta rule with as many heads, in the same run. KDA's decay per
channel reads 512 bytes of log decays per token and head, compared with 4 for one per head.
"""

import functools
from typing import Any

import jax

from jaxattn import kda
from jaxattn.bench.harness.timing import TimedOp, columns, rotation
from jaxattn.bench.linear_attention import gdn_prefill
from jaxattn.core.dispatch import Implementation

DIM = gdn_prefill.DIM
# H, sequences, tokens of each
Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = ((32, 1, 8192), (32, 8, 1024), (32, 4, 8192), (8, 1, 8192))
MORE_SHAPES: tuple[Shape, ...] = ((32, 1, 2048), (16, 1, 32768))
SMALL_SHAPES: tuple[Shape, ...] = ((2, 2, 70),)


def label(shape: Shape) -> dict[str, str]:
    return {"H": str(shape[0]), "sequences": f"{shape[1]}x{shape[2]}"}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def inputs(heads: int, count: int, length: int, seed: int = 0) -> dict[str, Any]:
    """The operands of gdn_prefill.py, with a log decay per channel."""
    found = gdn_prefill.inputs(heads, heads, count, length, seed)
    drawn = jax.random.uniform(jax.random.key(seed + 99), (*found["g"].shape, DIM))
    return found | {"g": jax.nn.log_sigmoid(drawn)}


def moved(heads: int, count: int, length: int) -> int:
    """Bytes of q, k, v, the log decays, beta, the output and the final states."""
    token = heads * (4 * 2 * DIM + 4 * DIM + 4)
    return count * (length * token + heads * DIM * DIM * 4)


def prefill(shape: Shape, implementation: Implementation | None) -> TimedOp:
    def call(operands: Any, state: Any, _: Any) -> tuple[Any, Any]:
        rule = kda.chunk_kda(
            **operands, use_qk_l2norm=True, output_final_state=True, implementation=implementation
        )
        return rule, state

    return TimedOp(call, [inputs(*shape, seed=seed) for seed in range(rotation(moved(*shape)))])


def measure(
    shape: Shape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table; with `xla` also XLA's time."""
    heads, count, length = shape
    op, as_gdn = prefill(shape, implementation), (heads, *shape)
    error = gdn_prefill.check(op, as_gdn)
    if not error < 5e-3:
        raise AssertionError(f"kda prefill {shape}: relative L2 {error} against float64")
    time, _ = times = op.times()
    del op  # frees memory for the intermediates of the next ops
    xla_columns = {"xla ms": prefill(shape, "xla").time() * 1e3} if xla else {}
    return {
        **label(shape),
        **columns("ms", times),
        "gdn ms": gdn_prefill.prefill(as_gdn, implementation).time() * 1e3,
        **xla_columns,
        "TFLOP/s": gdn_prefill.FLOP * count * length * heads / time / 1e12,
        "GB/s": moved(*shape) / time / 1e9,
        "relative L2": error,
    }
