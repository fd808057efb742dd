"""`python -m jaxattn.bench moe`: an MoE layer in a stack of layers, checked and timed.

Times are those of `timing`. A call routes random logits and multiplies. Call i uses layer i of the
stack, so L2 does not hold a layer's weights when its turn comes. The table also contains the time
of each kernel, from a profile; `rest us` is the time of XLA's kernels. GB/s counts the weights of
each chosen expert once. XLA's ragged product is timed only for few tokens.
"""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxattn.arena import Arena
from jaxattn.bench.harness import numpy_reference
from jaxattn.bench.harness.timing import TimedOp, columns, gpu_events
from jaxattn.core.dispatch import Implementation
from jaxattn.core.numerics.four_bit_tiles import ROWS, FourBitFormat, dequantize, quantize
from jaxattn.kernels.moe.launch import FP8, mixture_of_experts_mosaic
from jaxattn.kernels.moe.tile_config import BLOCK, MoeTileConfig
from jaxattn.moe import Router, mixture_of_experts, route, scratch


@dataclasses.dataclass(frozen=True)
class MoeShape:
    """The shape of a model's MoE layer: F, I, its router, and the layers of the timed stack."""

    hidden: int
    expert_size: int
    router: Router
    layers: int
    fp8: bool = False
    form: FourBitFormat | None = None

    @property
    def number_bytes(self) -> float:
        """Bytes per weight; for 4 bits including the scale."""
        if self.form is None:
            return 1 if self.fp8 else 2
        return self.form.tile_bytes / (ROWS * self.form.columns)


MXFP4, INT4_128 = FourBitFormat("mxfp4", 32, "e8m0"), FourBitFormat("int4", 128)
TOP_4 = Router(experts=32, top_k=4, scores="softmax", normalize=True)
TOP_8 = Router(experts=128, top_k=8, scores="softmax", normalize=True)
V3_GROUPS: dict[str, Any] = {"groups": 8, "top_groups": 4, "best_of_group": 2}
SIGMOID: dict[str, Any] = {"scores": "sigmoid", "normalize": True, "scale": 2.5}
MODELS = {
    "v2-lite": MoeShape(2048, 1408, Router(experts=64, top_k=6, scores="softmax"), 8),
    "glm-4.7-flash": MoeShape(2048, 1536, Router(experts=64, top_k=4, **SIGMOID), 8),
    "qwen3-next-fp8": MoeShape(
        2048, 512, Router(experts=512, top_k=10, scores="softmax", normalize=True), 8, fp8=True
    ),
    "v3-fp8": MoeShape(
        7168, 2048, Router(experts=256, top_k=8, **SIGMOID, **V3_GROUPS), 2, fp8=True
    ),
    "gpt-oss": MoeShape(2880, 2880, TOP_4, 4),
    "gpt-oss-mxfp4": MoeShape(2880, 2880, TOP_4, 8, form=MXFP4),
    "qwen3-30b": MoeShape(2048, 768, TOP_8, 6),
    "qwen3-30b-int4": MoeShape(2048, 768, TOP_8, 16, form=INT4_128),
    "small-int4": MoeShape(
        128, 128, Router(experts=4, top_k=2, scores="softmax"), 2, form=INT4_128
    ),
    "small": MoeShape(128, 64, Router(experts=4, top_k=2, scores="softmax"), 2),
    "small-fp8": MoeShape(128, 128, Router(experts=4, top_k=2, scores="softmax"), 2, fp8=True),
}
Shape = tuple[str, int]  # the model, T
SHAPES: tuple[Shape, ...] = (
    *(("v2-lite", tokens) for tokens in (1, 8, 32, 128, 8192)),
    *(("qwen3-next-fp8", tokens) for tokens in (1, 8, 32, 128)),
    *(("v3-fp8", tokens) for tokens in (1, 8, 32, 128)),
    *(("glm-4.7-flash", tokens) for tokens in (1, 8, 32, 128)),
    *((name, tokens) for name in ("gpt-oss", "gpt-oss-mxfp4") for tokens in (1, 8, 32, 64, 128)),
    *((name, tokens) for name in ("qwen3-30b", "qwen3-30b-int4") for tokens in (1, 8, 32, 64, 128)),
)
MORE_SHAPES: tuple[Shape, ...] = ()
SMALL_SHAPES: tuple[Shape, ...] = (("small", 3), ("small-fp8", 9), ("small-int4", 2))
XLA_TOKENS = 32  # for more tokens, XLA's product needs memory for each pair of token and expert
CHECKED = 3  # number of tokens to check
KERNELS = {
    "route": ("moe_route",),
    "list": ("moe_list", "moe_count", "moe_place", "moe_permute"),
    "gate_up": ("moe_gate_up",),
    "down": ("moe_down",),
    "combine": ("moe_combine",),
}


def label(shape: Shape) -> dict[str, str]:
    return {"model": shape[0], "T": str(shape[1])}


@functools.lru_cache(maxsize=1)
def weights_of(name: str) -> dict[str, jax.Array]:
    """A stack of layers with random weights; the cache keeps only the last model's."""
    model = MODELS[name]
    features, width, experts = model.hidden, model.expert_size, model.router.experts
    gate_up: tuple[int, ...] = (2 * width, features)
    down = (features, width)
    if model.form is not None:
        gate_up = (2, width, features)

    def draw(seed: int, shape: tuple[int, ...], scale: float) -> jax.Array:
        def of_layer(key: jax.Array) -> jax.Array:
            if model.form is not None:
                return quantize(jax.random.normal(key, (experts, *shape)) * scale, model.form)
            if not model.fp8:
                return jax.random.normal(key, (experts, *shape), jnp.bfloat16) * scale
            # Bits of random numbers below 2, with any sign and exponent.
            bits = jax.random.bits(key, (experts, *shape), jnp.uint8) & 0xBF
            return lax.bitcast_convert_type(bits, FP8)

        keys = jax.random.split(jax.random.key(seed), model.layers)
        return jax.jit(lambda keys: lax.map(of_layer, keys))(keys)

    def scales(seed: int, *shape: int, scale: float) -> jax.Array:
        drawn = jax.random.uniform(jax.random.key(seed), (model.layers, experts, *shape))
        return (0.5 + drawn) * scale

    inner, outer = features**-0.5, width**-0.5
    made = {"gate_up": draw(0, gate_up, inner), "down": draw(1, down, outer)}
    if model.fp8:
        blocks = features // BLOCK, width // BLOCK
        made["gate_up_scale"] = scales(2, 2, blocks[1], blocks[0], scale=inner)
        made["down_scale"] = scales(3, *blocks, scale=outer)
    return made


def inputs(shape: Shape) -> tuple[jax.Array, jax.Array]:
    """x and the router's logits."""
    model, tokens = MODELS[shape[0]], shape[1]
    keys = jax.random.split(jax.random.key(tokens), 2)
    x = jax.random.normal(keys[0], (tokens, model.hidden), jnp.bfloat16)
    return x, jax.random.normal(keys[1], (tokens, model.router.experts))


def mixture(
    shape: Shape, implementation: Implementation | None, config: MoeTileConfig | None = None
) -> TimedOp:
    """Routing and experts as one timed op; `config` selects our kernels and their tiles."""
    model, tokens = MODELS[shape[0]], shape[1]
    bias = jnp.zeros(model.router.experts) if model.router.scores == "sigmoid" else None
    spec = scratch(
        tokens=tokens, top_k=model.router.top_k, experts=model.router.experts,
        hidden=model.hidden, expert_size=model.expert_size, fp8=model.fp8, form=model.form,
        config=config,
    )  # fmt: skip

    def call(operands: Any, arena: Arena, layer: jax.Array) -> tuple[jax.Array, Arena]:
        (x, logits), weights = operands
        chosen = route(logits, bias, model.router)
        options: dict[str, Any] = {
            **weights, "form": model.form, "layer": layer, "arena": arena
        }  # fmt: skip
        if config is not None:
            return mixture_of_experts_mosaic(x, *chosen, **options, config=config)
        return mixture_of_experts(x, *chosen, **options, implementation=implementation)

    operands = (inputs(shape), weights_of(shape[0]))
    return TimedOp(call, [operands], Arena.allocate(spec), layers=model.layers)


def ids_of(shape: Shape) -> np.ndarray:
    model = MODELS[shape[0]]
    bias = jnp.zeros(model.router.experts) if model.router.scores == "sigmoid" else None
    return np.asarray(route(inputs(shape)[1], bias, model.router)[0])


def counts(shape: Shape) -> tuple[float, float]:
    """The FLOP and the bytes of a call."""
    model, tokens = MODELS[shape[0]], shape[1]
    numbers = 3 * model.hidden * model.expert_size
    used = len(np.unique(ids_of(shape)))
    pairs = tokens * model.router.top_k
    moved = used * numbers * model.number_bytes
    # Per pair: x and h read, h written, y written and read. Per token: x and the output.
    moved += pairs * (2 * model.hidden + 4 * model.expert_size + 8 * model.hidden)
    return 2 * pairs * numbers, moved + tokens * 6 * model.hidden


@functools.partial(jax.jit, static_argnums=0)
def _exact(name: str, x: jax.Array, ids: jax.Array, shares: jax.Array, weights: Any) -> jax.Array:
    """A token's output in layer 0 in float32; intermediates are rounded as in the kernels."""
    model = MODELS[name]
    gate_up, down = (weights[key][0, ids] for key in ("gate_up", "down"))
    if model.form is None:
        gate_up, down = gate_up.astype(jnp.float32), down.astype(jnp.float32)
    else:
        gate_up, down = (dequantize(each, model.form, x.dtype) for each in (gate_up, down))
        gate_up = gate_up.reshape(len(ids), -1, model.hidden).astype(jnp.float32)
        down = down.astype(jnp.float32)
    spread = lambda scale: scale.repeat(BLOCK, -2).repeat(BLOCK, -1)  # noqa: E731
    if model.fp8:
        gate_up *= spread(weights["gate_up_scale"][0, ids]).reshape(gate_up.shape)
        down *= spread(weights["down_scale"][0, ids])
    product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    gate, up = jnp.split(product("kjf,f->kj", gate_up, x.astype(jnp.float32)), 2, axis=1)
    h = (jax.nn.silu(gate) * up).astype(x.dtype).astype(jnp.float32)
    return product("k,kfi,ki->f", shares, down, h)


def check(op: TimedOp, shape: Shape) -> float:
    """The largest relative L2 error of some tokens in the first layer, against float32.

    Raises:
        AssertionError: the error is larger than rounding explains.
    """
    model = MODELS[shape[0]]
    (x, logits), weights = op.operands[0]
    bias = jnp.zeros(model.router.experts) if model.router.scores == "sigmoid" else None
    ids, shares = route(logits, bias, model.router)
    out = op(0)
    errors = []
    for t in np.unique(np.linspace(0, shape[1] - 1, CHECKED).astype(int)):
        expected = _exact(shape[0], x[t], ids[t], shares[t], weights)
        errors.append(numpy_reference.relative_l2(out[t], numpy_reference.exact(expected)))
    error = numpy_reference.worst(errors)
    if not error < 5e-3:
        raise AssertionError(f"moe {shape}: relative error {error}")
    return error


def parts(op: TimedOp, calls: int = 10) -> dict[str, float]:
    """Microseconds per call of each kernel, and of XLA's other work; empty without a GPU."""
    if jax.default_backend() != "gpu":
        return {}
    events = gpu_events(lambda: jax.block_until_ready([op(i) for i in range(calls)][-1]))
    spent: dict[str, float] = collections.defaultdict(float)
    for name, each in events.items():
        if not name.startswith("MemcpyH2D"):
            part = next(
                (key for key, own in KERNELS.items() if any(x in name for x in own)), "rest"
            )
            spent[part] += sum(length for _, length in each) * 1e-3 / calls
    return {f"{part} us": spent[part] for part in (*KERNELS, "rest")}


def measure(
    shape: Shape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table; with `xla` also XLA's time, for few tokens."""
    op = mixture(shape, implementation)
    error = check(op, shape)
    time, _ = times = op.times()
    each = parts(op)
    del op
    model = MODELS[shape[0]]
    xla = xla and shape[1] <= XLA_TOKENS and not model.fp8 and model.form is None
    flops, moved = counts(shape)
    return {
        **label(shape),
        **columns("us", times),
        **each,
        "xla us": mixture(shape, "xla").time() * 1e6 if xla else "",
        "MB": moved / 1e6,
        "TFLOP/s": flops / time / 1e12,
        "GB/s": moved / time / 1e9,
        "relative error": error,
    }
