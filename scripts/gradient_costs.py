"""The cost of a gradient in addition to its forward pass: temporary memory, and on a GPU time.

    python -m scripts.gradient_costs --json FILE       # on an H100 or H200
    JAX_PLATFORMS=cpu python -m scripts.gradient_costs # only memory, for Hopper: see compiled.py
    JAX_PLATFORMS=cpu python -m scripts.gradient_costs --small  # tiny shapes, run on a CPU

Kernels run the forward and the backward pass where they support the shape. `GiB` is XLA's temporary
memory of one layer's op, without arguments and results. The cotangent is an argument; the output
and the gradients are results.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxattn.bench.harness.device_info import device_facts
from jaxattn.bench.harness.result_tables import show, store
from jaxattn.bench.harness.timing import seconds
from jaxattn.gdn import chunk_gated_delta_rule
from jaxattn.mla import causal_attention

GIB = 2**30


class Case(NamedTuple):
    """An op and its operands.

    Attributes:
        name: The op's name.
        shape: Rows, tokens and heads, for the table.
        op: The function to differentiate.
        arguments: The shapes of the operands, all of which get gradients.
    """

    name: str
    shape: str
    op: Callable[..., jax.Array]
    arguments: tuple[jax.ShapeDtypeStruct, ...]


def attention(rows: int, tokens: int, heads: int) -> Case:
    """MLA's attention over a prompt: keys of 128 + 64 dims, values of 128."""
    x = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)

    def op(q: jax.Array, k: jax.Array, k_pe: jax.Array, v: jax.Array) -> jax.Array:
        return causal_attention(q, k, v, k_pe=k_pe, scale=192**-0.5)[0]

    each = (rows, tokens, heads)
    arguments = x((*each, 192)), x((*each, 128)), x((rows, tokens, 64)), x((*each, 128))
    return Case("causal_attention", f"{rows} x {tokens:,}, {heads} heads", op, arguments)


def delta_rule(rows: int, tokens: int, key_heads: int, heads: int) -> Case:
    """The chunked gated delta rule over a prompt, which normalizes q and k itself."""
    x = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    gates = jax.ShapeDtypeStruct((rows, tokens, heads), jnp.float32)

    def op(*operands: jax.Array) -> jax.Array:
        q, k, v, g, beta = operands
        decay, strength = jax.nn.log_sigmoid(g), jax.nn.sigmoid(beta)
        return chunk_gated_delta_rule(q, k, v, decay, strength, use_qk_l2norm=True)[0]

    keys, values = x((rows, tokens, key_heads, 128)), x((rows, tokens, heads, 128))
    shape = f"{rows} x {tokens:,}, {key_heads}/{heads} heads"
    return Case("chunk_gated_delta_rule", shape, op, (keys, keys, values, gates, gates))


CASES = (
    functools.partial(attention, 1, 2048, 16),
    functools.partial(attention, 1, 8192, 16),
    functools.partial(attention, 4, 2048, 128),
    functools.partial(delta_rule, 1, 8192, 16, 32),
    functools.partial(delta_rule, 4, 2048, 8, 32),
)
SMALL = (functools.partial(attention, 1, 96, 2), functools.partial(delta_rule, 1, 128, 1, 2))


def gradient(case: Case) -> Callable[..., Any]:
    """Returns (cotangent, *operands) -> (output, *gradients)."""

    def both(cotangent: jax.Array, *operands: jax.Array) -> tuple[Any, ...]:
        out, pull = jax.vjp(case.op, *operands)
        return out, *pull(cotangent)

    return both


def executable(op: Callable[..., Any], arguments: tuple[Any, ...], *, here: bool) -> Any:
    """The op compiled for this process's device, or for a Hopper GPU that need not exist."""
    if here:
        return jax.jit(op).lower(*arguments).compile()
    from scripts.compiled import compiled

    return compiled(op, arguments)


def measure(case: Case, *, here: bool) -> dict[str, Any]:
    """A row with the temporary memory of both passes and, if they run, their milliseconds."""
    row: dict[str, Any] = {"op": case.name, "shape": case.shape}
    out = jax.eval_shape(case.op, *case.arguments)
    both = "with gradient", gradient(case), (out, *case.arguments)
    for name, op, arguments in (("forward", case.op, case.arguments), both):
        step = executable(op, arguments, here=here)
        row[f"{name} GiB"] = step.memory_analysis().temp_size_in_bytes / GIB
        if here:
            keys = jax.random.split(jax.random.key(0), len(arguments))
            operands = [
                jax.random.normal(key, x.shape, x.dtype)
                for key, x in zip(keys, arguments, strict=True)
            ]
            row[f"{name} ms"] = 1e3 * seconds(functools.partial(step, *operands))
    return row


def rows(cases: Sequence[Callable[[], Case]], *, here: bool) -> Iterator[dict[str, Any]]:
    for case in cases:
        row = measure(case(), here=here)
        print(row, file=sys.stderr, flush=True)
        yield row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gradient_costs", description="Memory and time of gradients."
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try it on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args(argv)
    here = args.small or jax.default_backend() == "gpu"
    facts = device_facts() if here else {"device": "compiled for Hopper, not run"}
    found = list(rows(SMALL if args.small else CASES, here=here))
    store({**facts, "jax": jax.__version__, "what": "gradients", "rows": found}, args.json)
    show(f"gradients, {facts['device']}", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
