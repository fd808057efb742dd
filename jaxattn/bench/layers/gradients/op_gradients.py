"""`python -m jaxattn.bench train`: ops forward and backward, compared with other JAX libraries.

Before timing an op, the bench compares its gradients for `CHECKED` tokens with XLA's in float32.
gradient_timing.py explains the columns. A baseline takes the same operands, or reports why it
cannot. `xla` is this package's reference, which uses `jax.lax.ragged_dot` for experts. FLA and
FlashQLA run in their own processes (`baselines/torch_runner.py`). TFLOP/s counts the products of
the forward pass three times.
"""

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn import gdn, gqa, kda, mla, moe
from jaxattn.bench.layers.gradients.gradient_timing import (
    CompiledPass,
    gradient_columns,
    relative_l2,
    value_and_gradient,
)
from jaxattn.core.dispatch import Implementation

CHECKED = 128  # tokens
MOST_ERROR = 2e-2
DELTA_FLOP = 8 * 128 * 128  # per token and head: the state is read, corrected, written and read
Shape = tuple[str, int, int]  # the op, rows, tokens of each
SHAPES: tuple[Shape, ...] = (
    ("mla", 1, 8192),
    ("gqa", 1, 8192),
    ("gdn", 1, 8192),
    ("gdn", 4, 8192),
    ("gdn", 1, 32768),
    ("kda", 1, 4096),
    ("experts", 1, 8192),
)
MORE_SHAPES: tuple[Shape, ...] = (("mla", 4, 2048), ("gqa", 4, 2048), ("experts", 1, 2048))
SMALL_SHAPES: tuple[Shape, ...] = (("small experts", 1, 24),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedOp:
    """An op whose gradients are timed.

    Attributes:
        sizes: The heads or experts, as shown in the table.
        floats: Makes the differentiated operands for (rows, tokens).
        fixed: Makes the other operands for (rows, tokens).
        call: (floats, fixed, implementation) -> output.
        flop: The FLOP of the forward pass's products for (rows, tokens).
        peers: Functions of other libraries of the same floats and fixed operands.
    """

    sizes: str
    floats: Callable[[int, int], dict[str, jax.Array]]
    fixed: Callable[[int, int], dict[str, jax.Array]]
    call: Callable[[Any, Any, Implementation | None], jax.Array]
    flop: Callable[[int, int], float]
    peers: dict[str, Callable[[Any, Any], jax.Array]] = dataclasses.field(default_factory=dict)


def nothing(rows: int, tokens: int) -> dict[str, jax.Array]:
    del rows, tokens
    return {}


def draw(seed: int, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    made = jax.jit(lambda key: (jax.random.normal(key, shape) * scale).astype(dtype))
    return made(jax.random.key(seed))


def mla_op(heads: int) -> TrainedOp:
    def floats(rows: int, tokens: int) -> dict[str, jax.Array]:
        each = rows, tokens, heads
        k = draw(1, *each, 128)
        return {"q": draw(0, *each, 192), "k": k, "k_pe": draw(2, rows, tokens, 64),
                "v": draw(3, *each, 128)}  # fmt: skip

    def call(floats: Any, fixed: Any, implementation: Implementation | None) -> jax.Array:
        return mla.causal_attention(**floats, scale=192**-0.5, implementation=implementation)[0]

    def together(floats: Any) -> tuple[jax.Array, ...]:
        """The operands of libraries whose keys are one array."""
        q, k, v = floats["q"], floats["k"], floats["v"]
        k_pe = jnp.broadcast_to(floats["k_pe"][:, :, None], (*k.shape[:3], 64))
        return q, jnp.concatenate([k, k_pe], -1), v

    def cudnn(floats: Any, fixed: Any) -> jax.Array:
        """Calls cuDNN below `jax.nn`, which refuses keys of 192 with values of 128."""
        library: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
        causal = library.MaskType.CAUSAL
        out: jax.Array = library.dot_product_attention(
            *together(floats), scale=192**-0.5, mask_type=causal
        )
        return out

    def tokamax(floats: Any, fixed: Any) -> jax.Array:
        return tokamax_attention(*together(floats))

    flop = lambda rows, tokens: rows * tokens**2 * heads * (192 + 128)  # noqa: E731
    return TrainedOp(
        sizes=f"{heads} x 192/128",
        floats=floats,
        fixed=nothing,
        call=call,
        flop=flop,
        peers={"cudnn": cudnn, "tokamax": tokamax},
    )


def tokamax_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    library = importlib.import_module("tokamax")
    out: jax.Array = library.dot_product_attention(
        q, k, v, is_causal=True, implementation="mosaic_gpu"
    )
    return out


def gqa_op(heads: int, kv_heads: int, dim: int) -> TrainedOp:
    def floats(rows: int, tokens: int) -> dict[str, jax.Array]:
        keys = rows, tokens, kv_heads, dim
        return {"q": draw(0, rows, tokens, heads, dim), "k": draw(1, *keys), "v": draw(2, *keys)}

    # By name, because `jax.jit` returns a dict in the order of its keys.
    def call(floats: Any, fixed: Any, implementation: Implementation | None) -> jax.Array:
        return gqa.gqa_attention(**floats, implementation=implementation)[0]

    def cudnn(floats: Any, fixed: Any) -> jax.Array:
        q, k, v = floats["q"], floats["k"], floats["v"]
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    def tokamax(floats: Any, fixed: Any) -> jax.Array:
        return tokamax_attention(floats["q"], floats["k"], floats["v"])

    return TrainedOp(
        sizes=f"{heads}/{kv_heads} x {dim}",
        floats=floats,
        fixed=nothing,
        call=call,
        flop=lambda rows, tokens: rows * tokens**2 * heads * 2 * dim,
        peers={"cudnn": cudnn, "tokamax": tokamax},
    )


def delta_op(rule: Callable[..., Any], key_heads: int, heads: int, channels: bool) -> TrainedOp:
    def floats(rows: int, tokens: int) -> dict[str, jax.Array]:
        keys, values = (rows, tokens, key_heads, 128), (rows, tokens, heads, 128)
        gates = (*values[:3], 128) if channels else values[:3]
        g = jax.nn.log_sigmoid(draw(3, *gates, dtype=jnp.float32))
        beta = jax.nn.sigmoid(draw(4, *values[:3], dtype=jnp.float32))
        return {"q": draw(0, *keys), "k": draw(1, *keys), "v": draw(2, *values), "g": g,
                "beta": beta}  # fmt: skip

    def call(floats: Any, fixed: Any, implementation: Implementation | None) -> jax.Array:
        out: jax.Array = rule(**floats, use_qk_l2norm=True, implementation=implementation)[0]
        return out

    return TrainedOp(
        sizes=f"{key_heads}/{heads} x 128",
        floats=floats,
        fixed=nothing,
        call=call,
        flop=lambda rows, tokens: rows * tokens * heads * DELTA_FLOP,
    )


def experts_op(experts: int, top_k: int, hidden: int, width: int) -> TrainedOp:
    def floats(rows: int, tokens: int) -> dict[str, jax.Array]:
        shares = jax.nn.softmax(draw(2, rows * tokens, top_k, dtype=jnp.float32))
        return {
            "x": draw(0, rows * tokens, hidden),
            "weights": shares,
            "gate_up": draw(3, experts, 2 * width, hidden, scale=hidden**-0.5),
            "down": draw(4, experts, hidden, width, scale=width**-0.5),
        }

    def fixed(rows: int, tokens: int) -> dict[str, jax.Array]:
        scores = draw(1, rows * tokens, experts, dtype=jnp.float32)
        return {"ids": jax.lax.top_k(scores, top_k)[1].astype(jnp.int32)}

    def call(floats: Any, fixed: Any, implementation: Implementation | None) -> jax.Array:
        out: jax.Array = moe.mixture_of_experts(**floats, **fixed, implementation=implementation)
        return out

    def tokamax(floats: Any, fixed: Any) -> jax.Array:
        """tokamax's ragged products between our sort and our sum. Its weights are [in, out]."""
        library = importlib.import_module("tokamax")
        flat = fixed["ids"].reshape(-1)
        order, sizes = jnp.argsort(flat, stable=True), jnp.bincount(flat, length=experts)
        dot = partial(
            library.ragged_dot, group_sizes=sizes.astype(jnp.int32), implementation="mosaic_gpu",
            preferred_element_type=jnp.bfloat16,
        )  # fmt: skip
        both = dot(floats["x"][order // top_k], floats["gate_up"].swapaxes(1, 2))
        gate, up = jnp.split(both.astype(jnp.float32), 2, axis=1)
        out = dot((jax.nn.silu(gate) * up).astype(jnp.bfloat16), floats["down"].swapaxes(1, 2))
        out = jnp.zeros_like(out).at[order].set(out).reshape(*fixed["ids"].shape, -1)
        return (out.astype(jnp.float32) * floats["weights"][..., None]).sum(1)

    return TrainedOp(
        sizes=f"{top_k} of {experts} x {hidden}/{width}",
        floats=floats,
        fixed=fixed,
        call=call,
        flop=lambda rows, tokens: rows * tokens * top_k * 6 * hidden * width,
        peers={"tokamax": tokamax},
    )


OPS: dict[str, Callable[[], TrainedOp]] = {
    "mla": partial(mla_op, 16),
    "gqa": partial(gqa_op, 32, 8, 128),
    "gdn": partial(delta_op, gdn.chunk_gated_delta_rule, 16, 32, False),
    "kda": partial(delta_op, kda.chunk_kda, 16, 16, True),
    "experts": partial(experts_op, 64, 6, 2048, 1408),
    "small experts": partial(experts_op, 4, 2, 64, 64),
}


def label(shape: Shape) -> dict[str, str]:
    name, rows, tokens = shape
    return {"op": name, "sequences": f"{rows}x{tokens}"}


def check(op: TrainedOp, tokens: int, implementation: Implementation | None) -> float:
    """The largest relative L2 error of the gradients of some tokens, against float32."""
    floats, fixed, cotangent = operands_of(op, 1, tokens)

    def gradients(floats: Any, implementation: Implementation | None) -> Any:
        call = lambda floats, fixed: op.call(floats, fixed, implementation)  # noqa: E731
        return jax.jit(value_and_gradient(call))(floats, fixed, cotangent)[1]

    wide = jax.tree.map(lambda x: x.astype(jnp.float32), floats)
    with jax.default_matmul_precision("highest"):
        wanted = gradients(wide, "xla")
    return relative_l2(gradients(floats, implementation), wanted)


def operands_of(op: TrainedOp, rows: int, tokens: int) -> tuple[Any, Any, jax.Array]:
    """(differentiated operands, other operands, a cotangent)."""
    floats, fixed = op.floats(rows, tokens), op.fixed(rows, tokens)
    out = jax.eval_shape(lambda: op.call(floats, fixed, "xla"))
    return floats, fixed, draw(9, *out.shape, dtype=out.dtype)


def measure(
    shape: Shape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table; with `xla` also XLA's time and memory."""
    name, rows, tokens = shape
    op = OPS[name]()
    error = check(op, min(CHECKED, tokens), implementation)
    if not error < MOST_ERROR:
        raise AssertionError(f"train {shape}: gradients differ by {error} in relative L2")
    floats, fixed, cotangent = operands_of(op, rows, tokens)
    ours = lambda floats, fixed: op.call(floats, fixed, implementation)  # noqa: E731
    row: dict[str, Any] = {**label(shape), "sizes": op.sizes}
    row |= gradient_columns(ours, floats, fixed, cotangent)
    time = row["ms"] * 1e-3
    row["TFLOP/s"] = 3 * op.flop(rows, tokens) / time / 1e12
    moved = 2 * sum(x.nbytes for x in (*jax.tree.leaves(floats), cotangent))
    row["GB/s"] = moved / time / 1e9
    row["relative L2"] = error
    if xla:
        by_xla = lambda floats, fixed: op.call(floats, fixed, "xla")  # noqa: E731
        row |= dict(peer_columns("xla", by_xla, (floats, fixed, cotangent)))
    return row


def measure_peers(shape: Shape) -> dict[str, float]:
    """The columns of other JAX libraries, which run in this process."""
    name, rows, tokens = shape
    op = OPS[name]()
    operands = operands_of(op, rows, tokens)
    found: dict[str, float] = {}
    for who, function in op.peers.items():
        found |= dict(peer_columns(who, function, operands))
    return found


def peer_columns(
    who: str, function: Callable[..., Any], operands: tuple[Any, ...]
) -> Iterator[tuple[str, float]]:
    """Yields a baseline's time and memory; if the baseline fails, prints the error instead."""
    if who == "tokamax" and importlib.util.find_spec("tokamax") is None:
        return
    try:
        both = CompiledPass(value_and_gradient(function), operands)
        times = {"ms": both.kernel_seconds() * 1e3, "MiB": both.mebibytes}
    except Exception as error:  # any kind, because the failure is the baseline's
        first = (str(error).strip().splitlines() or [""])[0]
        print(f"{who}: {type(error).__name__}: {first}", file=sys.stderr, flush=True)
        return
    yield from ((f"{who} {unit}", number) for unit, number in times.items())
