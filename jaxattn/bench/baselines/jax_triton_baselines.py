"""Triton kernels of other packages, run in our process and on our arrays through jax-triton.

FLA's recurrence is compared with our decode of a gated delta net, without our op's convolution,
gates and norm. It reads and writes states of the same layout and dtype. FlagGems' kernel is
compared with our MLA decode, on the same cache. It returns no LSE and does not split rows. vLLM's
TurboQuant kernels are compared with ours, over slots of their own (vllm_turboquant.py).
torch_runner.py times FLA's and FlagGems' kernels as PyTorch launches them.
"""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import gdn
from jaxattn.bench.attention import mla
from jaxattn.bench.baselines import vllm_turboquant
from jaxattn.bench.harness import numpy_reference
from jaxattn.bench.harness.timing import TimedOp, rotation
from jaxattn.bench.linear_attention import gdn_layer_decode
from jaxattn.ops.mla.decode import mla_decode

COMMON = {"jax_triton": "jax-triton", "triton": "triton", "torch": "torch"}
# Columns of a state per block, warps and stages, as in FLA's launch.
COLUMNS, WARPS, STAGES = 8, 1, 3
# Heads and tokens per block, warps and stages, as in FlagGems' launch on Hopper.
HEADS, TOKENS, LATENT_WARPS, LATENT_STAGES = 64, 64, 8, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TritonBaseline:
    """A kernel to time.

    Attributes:
        name: The package's name.
        packages: The required packages: pip's name by module.
        takes: Whether the kernel supports a shape of the bench.
        op: Makes the op for a supported shape.
        error: Returns the relative L2 error of an op, against our definition.
        loops: Whether to time a loop of calls too, with inputs of several layers.
    """

    name: str
    packages: dict[str, str]
    takes: Callable[[Any], bool]
    op: Callable[[Any], TimedOp]
    error: Callable[[TimedOp], float]
    loops: bool = False

    @property
    def columns(self) -> list[str]:
        """Columns of a row: microseconds of kernels, and of a call in a loop."""
        units = ["us", "call us"] if self.loops else ["us"]
        return [f"{self.name} (jax-triton) {unit}" for unit in units]

    def missing(self) -> list[str]:
        """The packages that pip would have to install."""
        return [
            package
            for module, package in self.packages.items()
            if importlib.util.find_spec(module) is None
        ]


def said(bench: str) -> list[str]:
    """A line with the baseline's versions, or why it cannot run; empty for other benches."""
    if bench not in PEERS:
        return []
    peer = PEERS[bench]
    if lacking := peer.missing():
        install = f"python3 -m pip install {' '.join(lacking)}"
        return [f"{peer.name} by jax-triton: not installed ({install})"]
    numbers = ", ".join(f"{name} {_version(name)}" for name in peer.packages.values())
    return [f"{peer.name} by jax-triton: {numbers}"]


def _version(package: str) -> str:
    """The version of an installed package; a module on the path may have no metadata."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


def times(bench: str, shape: Any) -> dict[str, float | str]:
    """The baseline's columns of a row; "" for a shape that it does not support."""
    if bench not in PEERS or PEERS[bench].missing() or jax.default_backend() != "gpu":
        return {}
    peer = PEERS[bench]
    if not peer.takes(shape):
        return dict.fromkeys(peer.columns, "")
    op = peer.op(shape)
    error = peer.error(op)
    if not error < 1e-2:
        raise AssertionError(f"{peer.name} by jax-triton {shape}: relative error {error}")
    times = op.times() if peer.loops else [op.time()]
    return {column: time * 1e6 for column, time in zip(peer.columns, times, strict=True)}


# --- FLA's recurrence


def inputs(batch: int, key_heads: int, value_heads: int, tokens: int) -> list[tuple[Any, ...]]:
    """(q, k, v, g, beta, state), with more states than fit in L2."""
    dim = gdn_layer_decode.DIM
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


def recurrence(batch: int, key_heads: int, value_heads: int, tokens: int) -> TimedOp:
    """FLA's kernel as a timed op, which returns the output and the updated states."""
    operands = inputs(batch, key_heads, value_heads, tokens)
    return TimedOp(lambda given, state, layer: (step_states(*given), state), operands)


def step_states(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(o [B, S, Hv, D], states [B, Hv, D, D]) of one launch."""
    jax_triton = importlib.import_module("jax_triton")
    kernels = importlib.import_module("jaxattn.bench.baselines.triton_adapters.fla_delta_rule")
    batch, tokens, value_heads, dim = v.shape
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v, state))
    return jax_triton.triton_call(
        q, k, v, g, beta, state, np.float32(dim**-0.5), tokens,  # a float would be fp64
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


def recurrence_error(op: TimedOp) -> float:
    """The larger error of the output and the states."""
    *given, state = op.operands[0]
    out, after = gdn.recurrent_gated_delta_rule(
        *given, initial_state=state, output_final_state=True, use_qk_l2norm=True
    )
    assert after is not None  # it was asked for
    pairs = zip(op(0), (numpy_reference.exact(out), numpy_reference.exact(after)), strict=True)
    return numpy_reference.worst(
        [numpy_reference.relative_l2(found, right) for found, right in pairs]
    )


# --- FlagGems' MLA decode


def latent(batch: int, heads: int, tokens: int | str, q_len: int) -> TimedOp:
    """FlagGems' kernel over the arrays of `bench mla`, one layer per call; returns the output."""
    arrays = mla.inputs(batch, heads, tokens, q_len)
    layers = arrays[1].shape[0]
    return TimedOp(
        lambda given, state, layer: (attend(given, layer), state), [arrays], layers=layers
    )


def attend(arrays: tuple[jax.Array, ...], layer: jax.Array) -> jax.Array:
    """out [B, H, R] of one launch over (q [B, 1, H, D], cache [L, N, C, D], tables, lengths)."""
    q, cache, tables, lens = arrays
    jax_triton = importlib.import_module("jax_triton")
    kernels = importlib.import_module("jaxattn.bench.baselines.triton_adapters.flaggems_mla")
    batch, _, heads, dim = q.shape
    pages, page = cache.shape[1:3]
    # Offsets into the whole cache select a layer's pages, so nothing is sliced.
    return jax_triton.triton_call(
        q, cache, tables + layer * pages, lens, np.float32(mla.SCALE),  # a float would be fp64
        kernel=kernels.attention,
        out_shape=jax.ShapeDtypeStruct((batch, heads, mla.RANK), q.dtype),
        grid=(-(-heads // HEADS), batch),
        num_warps=LATENT_WARPS,
        num_stages=LATENT_STAGES,
        heads=heads,
        width=tables.shape[1],
        page=page,
        rank=mla.RANK,
        dim=dim,
        block_heads=HEADS,
        block_tokens=TOKENS,
    )  # fmt: skip


def latent_error(op: TimedOp) -> float:
    """The error of the first and the last row, in layer 0."""
    q, cache, tables, lens = op.operands[0]
    found, ends = op(0), jnp.array([0, len(lens) - 1])
    right, _ = mla_decode(
        q[ends], cache, tables[ends], lens[ends], scale=mla.SCALE, layer=0, implementation="xla"
    )
    return numpy_reference.relative_l2(found[ends], numpy_reference.exact(right[:, 0]))


PEERS: dict[str, TritonBaseline] = {
    "gdn_layer_decode": TritonBaseline(
        name="fla",
        packages=COMMON | {"fla": "fla-core"},
        takes=lambda shape: shape[-1] == "float32",  # the dtype of FLA's states
        op=lambda shape: recurrence(*shape[:4]),
        error=recurrence_error,
    ),
    "mla": TritonBaseline(
        name="flaggems",
        packages=COMMON | {"flag_gems": "flag_gems"},
        takes=lambda shape: shape[3] == 1,  # tokens per row
        op=lambda shape: latent(*shape),
        error=latent_error,
    ),
    "turboquant": TritonBaseline(
        name="vllm",
        packages=COMMON | {"vllm": "vllm"},
        takes=lambda shape: True,
        op=vllm_turboquant.decode,
        error=vllm_turboquant.error,
        loops=True,
    ),
}
