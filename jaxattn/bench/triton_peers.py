"""Kernels of other packages in Triton, in our process and on our arrays, through jax-triton.

FLA's recurrence runs beside our decode of a gated delta net. It leaves out the convolution, the
gates and the norm of our op. It reads and writes states of the same layout and dtype. peers.py
times the same kernel as PyTorch launches it.
"""

import importlib
import importlib.metadata
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn import gdn
from jaxattn.bench import gdn_decode, reference
from jaxattn.bench.timing import Op, rotation

COLUMN = "fla (jax-triton) us"
PACKAGES = {"jax_triton": "jax-triton", "triton": "triton", "fla": "fla-core", "torch": "torch"}
# Columns of a state that a block has, warps and stages, as FLA launches its kernel.
COLUMNS, WARPS, STAGES = 8, 1, 3


def missing() -> list[str]:
    """What pip would have to install."""
    return [
        package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None
    ]


def said(bench: str) -> list[str]:
    """What runs beside this bench, or why nothing does: a line, or none for other benches."""
    if bench != "gdn_decode":
        return []
    if lacking := missing():
        return [f"fla by jax-triton: not installed (python3 -m pip install {' '.join(lacking)})"]
    versions = {package: importlib.metadata.version(package) for package in PACKAGES.values()}
    return [f"fla by jax-triton: {', '.join(f'{name} {v}' for name, v in versions.items())}"]


def times(bench: str, shape: gdn_decode.Shape) -> dict[str, float | str]:
    """The column of a row of the bench, microseconds of its kernel; "" where nothing was timed."""
    if bench != "gdn_decode" or missing() or jax.default_backend() != "gpu":
        return {}
    if shape[-1] != "float32":
        return {COLUMN: ""}  # as its states are
    op = recurrence(*shape[:4])
    error = check(op)
    if not error < 1e-2:
        raise AssertionError(f"fla by jax-triton {shape}: relative error {error} against XLA's")
    return {COLUMN: op.time() * 1e6}


def inputs(batch: int, key_heads: int, value_heads: int, tokens: int) -> list[tuple[Any, ...]]:
    """(q, k, v, g, beta, state), with as many states as do not fit in L2."""
    dim = gdn_decode.DIM
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def normal(heads: int) -> jax.Array:
        return jax.random.normal(next(keys), (batch, tokens, heads, dim), jnp.bfloat16)

    rows = normal(key_heads), normal(key_heads), normal(value_heads)
    uniform = [jax.random.uniform(next(keys), (batch, tokens, value_heads)) for _ in range(2)]
    gates = jax.nn.log_sigmoid(uniform[0]), uniform[1]
    shape = batch, value_heads, dim, dim
    count = rotation(batch * value_heads * dim * dim * 4)
    states = [jax.random.normal(key, shape) for key in jax.random.split(next(keys), count)]
    return [(*rows, *gates, state) for state in states]


def recurrence(batch: int, key_heads: int, value_heads: int, tokens: int) -> Op:
    """FLA's kernel over these; its result is the output and the states behind it."""
    operands = inputs(batch, key_heads, value_heads, tokens)
    return Op(lambda given, state, layer: (call(*given), state), operands)


def call(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(o [B, S, Hv, D], states [B, Hv, D, D]) of one launch."""
    jax_triton = importlib.import_module("jax_triton")
    kernels = importlib.import_module("jaxattn.bench.triton_kernels")
    batch, tokens, value_heads, dim = v.shape
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v, state))
    return jax_triton.triton_call(
        q, k, v, g, beta, state, dim**-0.5, tokens,
        kernel=kernels.recurrence,
        out_shape=shapes,
        grid=(dim // COLUMNS * batch * value_heads,),
        num_warps=WARPS,
        num_stages=STAGES,
        key_heads=q.shape[2],
        value_heads=value_heads,
        dim=dim,
        columns=COLUMNS,
    )  # fmt: skip


def check(op: Op) -> float:
    """Relative L2 error against our definition in XLA, the greater of output and states."""
    *given, state = op.operands[0]
    out, after = gdn.recurrent_gated_delta_rule(
        *given, initial_state=state, output_final_state=True, use_qk_l2norm=True
    )
    assert after is not None  # it was asked for
    pairs = zip(op(0), (reference.exact(out), reference.exact(after)), strict=True)
    return reference.worst([reference.relative_l2(found, right) for found, right in pairs])
