"""`python -m jaxattn.bench dense`: the dense products of a decode step, one by one.

Each product runs as in a decoder: inside a `lax.scan` over the stack of all layers' weights, with
the compiler options of a step. The stack is larger than the L2 cache. XLA multiplies both the
layout of `nn.Linear`, [L, K, N], and that of published checkpoints, [L, N, K]. The kernel of
`ops.linear_layer` takes [L, K, N], and that of `ops.linear_fp8_layer` takes [L, N, K] in FP8.
`writes` is the largest array that a layer writes in addition to its result, such as a copy of its
weights. `of 3.8 TB/s` counts only the weights, in FP8 one byte each.

`us` is the GPU time per layer from a profile, `longest us` that of the layer's longest kernel, and
`call us` the time per layer in the whole loop.
"""

import argparse
import functools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.bench.harness import run_metadata
from jaxattn.bench.harness.command_parser import command_parser
from jaxattn.bench.harness.materialized_arrays import materialized_arrays
from jaxattn.bench.harness.measured_peaks import copy_bandwidth
from jaxattn.bench.harness.result_tables import check_files, show, store
from jaxattn.bench.harness.timing import launches, rotation, seconds
from jaxattn.core.dispatch import Implementation, Refusal
from jaxattn.core.numerics.fp8_block_scaling import block_counts
from jaxattn.models.interface import compiler_options
from jaxattn.ops.linear.fp8_linear import linear_fp8_layer
from jaxattn.ops.linear.linear import linear_layer

# (K, N) of each product of a decode step, by model.
MODELS: dict[str, dict[str, tuple[int, int]]] = {
    "DeepSeek-V2-Lite": {
        "q_proj": (2048, 3072), "kv_a_proj": (2048, 576), "o_proj": (2048, 2048),
        "dense gate/up": (2048, 10944), "dense down": (10944, 2048),
        "lm_head": (2048, 102400),
    },
    "GLM-4.7-Flash": {
        "q_a_proj": (2048, 768), "q_b_proj": (768, 5120), "kv_a_proj": (2048, 576),
        "o_proj": (5120, 2048), "dense gate/up": (2048, 10240), "dense down": (10240, 2048),
        "lm_head": (2048, 154880),
    },
    "Qwen3-Next": {
        "q_proj": (2048, 8192), "k_proj, v_proj": (2048, 512), "o_proj, out_proj": (4096, 2048),
        "in_proj_qkvz": (2048, 12288), "in_proj_ba": (2048, 64),
        "lm_head": (2048, 151936),
    },
}  # fmt: skip
SMALL: dict[str, dict[str, tuple[int, int]]] = {"small": {"q_proj": (64, 96), "o_proj": (96, 64)}}
ROWS = (1, 8, 16, 32, 128)
WAYS = ("XLA [L, K, N]", "XLA [L, N, K]", "kernel [L, K, N]", "FP8 kernel [L, N, K]")
GOAL = 3.8e12  # bytes per second on an H200 that our kernels are compared with
COMPILERS = 8  # threads


type Stack = tuple[Any, ...]


class LinearCase(NamedTuple):
    """A product of `tokens` rows with a matrix of a stack, computed in one of `WAYS`."""

    tokens: int
    inner: int
    outer: int
    way: str

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix in bfloat16 or FP8, without scales (4 bytes per 16 KiB)."""
        return (1 if self.fp8 else 2) * self.inner * self.outer

    @property
    def fp8(self) -> bool:
        return self.way == WAYS[3]

    @property
    def layers(self) -> int:
        """The number of layers whose matrices together do not fit in L2."""
        return rotation(self.nbytes, max_inputs=128)

    @property
    def stack(self) -> Stack:
        """The shapes of the stacked matrices: one array, or FP8 numbers and their scales."""
        sides = (self.inner, self.outer)
        shape = (self.layers, *(sides[::-1] if self.way in (WAYS[1], WAYS[3]) else sides))
        if not self.fp8:
            return (jax.ShapeDtypeStruct(shape, jnp.bfloat16),)
        scales = (self.layers, *block_counts(*sides[::-1]))
        return (
            jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct(scales, jnp.float32),
        )


def products(
    models: dict[str, dict[str, tuple[int, int]]], rows: Sequence[int], ways: Sequence[str]
) -> dict[LinearCase, list[str]]:
    """Returns each distinct product with the names of the layers that use it."""
    found: dict[LinearCase, list[str]] = {}
    for model, shapes in models.items():
        for name, (inner, outer) in shapes.items():
            for way in ways:
                for tokens in rows:
                    product = LinearCase(tokens, inner, outer, way)
                    found.setdefault(product, []).append(f"{model} {name}")
    return found


def loop(
    x: jax.Array, stack: Stack, *, way: str, implementation: Implementation = "mosaic_gpu"
) -> tuple[jax.Array, jax.Array]:
    """Returns (a number of the stack's last product, x); each product waits for the previous one.

    Args:
        stack: The stacked matrices, and their scales if they are FP8.
        way: One of `WAYS`.
        implementation: The implementation of the kernel.
    """
    contracted = 1 if way == WAYS[1] else 0
    dimensions = (((1,), (contracted,)), ((), ()))

    def product(x: jax.Array, layer: jax.Array, weight: jax.Array) -> jax.Array:
        if way == WAYS[2]:
            return linear_layer(x, stack, layer=layer, implementation=implementation)[0]
        if way == WAYS[3]:
            numbers, scales = ([each] for each in stack)
            return linear_fp8_layer(x, numbers, scales, layer=layer, implementation=implementation)[
                0
            ]
        return lax.dot_general(x, weight, dimensions, preferred_element_type=jnp.float32)

    def step(carry: tuple[jax.Array, jax.Array], each: Any) -> tuple[Any, None]:
        x, seen = carry
        x, _ = lax.optimization_barrier((x, seen))
        return (x, lax.optimization_barrier(product(x, *each))[0, 0]), None

    layers = jnp.arange(stack[0].shape[0], dtype=jnp.int32)
    (x, seen), _ = lax.scan(step, (x, jnp.float32(0)), (layers, stack[0]))
    return seen, x


def compiled(product: LinearCase) -> jax.stages.Compiled | None:
    """The loop over a stack, compiled like a step; None if the kernel refuses the shape."""
    gpu = jax.default_backend() == "gpu"
    chosen: dict[str, Any] = {"way": product.way, "implementation": "mosaic_gpu" if gpu else "xla"}
    options = compiler_options(jax.default_backend())
    run = jax.jit(functools.partial(loop, **chosen), donate_argnums=0, compiler_options=options)
    x = jax.ShapeDtypeStruct((product.tokens, product.inner), jnp.bfloat16)
    try:
        return run.lower(x, product.stack).compile()
    except Refusal as refusal:
        print(f"{product}: {refusal}", file=sys.stderr, flush=True)
        return None


@functools.partial(jax.jit, static_argnums=(0, 1))
def normal(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape, jnp.bfloat16).astype(dtype)


def measure(product: LinearCase, executable: jax.stages.Compiled) -> dict[str, Any]:
    """Returns a row of the table."""
    held = normal((product.tokens, product.inner))
    stack = tuple(normal(each.shape, each.dtype) for each in product.stack)

    def run(_: int = 0) -> jax.Array:
        nonlocal held
        seen, held = executable(held, stack)
        return seen

    spent = launches(run)
    kernels = sum(each.seconds for each in spent.values()) / product.layers
    call = seconds(run) / product.layers
    time = kernels or call
    longest = max(spent, key=lambda launch: spent[launch].seconds) if spent else None
    result = 4 * product.tokens * product.outer
    wrote = [w for w in materialized_arrays(executable.as_text() or "") if w.nbytes > result]
    return {
        "T": product.tokens,
        "K": product.inner,
        "N": product.outer,
        "way": product.way,
        "us": time * 1e6,
        "longest us": spent[longest].seconds / product.layers * 1e6 if longest else "",
        "call us": call * 1e6,
        "GB/s": product.nbytes / time / 1e9,
        "of 3.8 TB/s": product.nbytes / time / GOAL,
        "launches": sum(each.launches for each in spent.values()) / product.layers,
        "writes": str(wrote[0]) if wrote else "",
        "kernel": longest.kernel[:80] if longest else "",
    }


def rows_of(wanted: dict[LinearCase, list[str]]) -> Iterator[dict[str, Any]]:
    """Yields a row for each product; a thread pool compiles all of them."""
    with ThreadPoolExecutor(COMPILERS) as pool:
        for product, executable in zip(wanted, pool.map(compiled, wanted), strict=True):
            if executable is not None:
                yield measure(product, executable) | {"of": "; ".join(wanted[product])}


def parse(argv: Sequence[str], program: str) -> argparse.Namespace:
    parser = command_parser(program, "dense", __doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=tuple(MODELS),
        default=list(MODELS),
        help="models whose matrix products are timed",
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=list(ROWS), help="tokens per product"
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=list(WAYS),
        help="implementations to time (default: all)",
    )
    parser.add_argument(
        "--small", action="store_true", help="use tiny shapes, to try the bench on a CPU"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write each row to this file as soon as it is measured",
    )
    args = parser.parse_args(argv)
    if min(args.rows) < 1:
        parser.error(f"--rows must be positive; got {min(args.rows)}")
    check_files(parser, args)
    return args


def main(argv: Sequence[str], program: str) -> int:
    args = parse(argv, program)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before the backend starts
    models = SMALL if args.small else {name: MODELS[name] for name in args.models}
    result = run_metadata.begin("dense", program, ["dense", *argv]) | {"rows": []}
    result["copy_GB_s"] = copy_bandwidth(2**20 if args.small else 2**29) / 1e9
    for row in rows_of(products(models, args.rows, args.ways)):
        print(row, file=sys.stderr, flush=True)
        result["rows"].append(row)
        store(result, args.json)
    run_metadata.end(result, args.json)
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}))
    columns = [name for name in result["rows"][0] if name != "kernel"]
    show(
        f"dense products on {result['device']}",
        [{name: row[name] for name in columns} for row in result["rows"]],
    )
    return 0
