"""Mixture of experts: which experts a token takes, and what they make of it.

    ids, weights = route(logits, bias, router)          [T, K] each
    y = mixture_of_experts(x, ids, weights, gate_up, down)

Routing is float32 throughout: a bias rounded to bfloat16 chooses other experts. Weights lie as
checkpoints have them, [out, in], gate's rows before up's. The kernels read them where they lie; XLA
copies a layer's experts out of the stack.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.arena import Arena
from jaxattn.core.checks import (
    FLOATS,
    Arguments,
    check_arena,
    check_array,
    check_layer,
)
from jaxattn.core.dispatch import Implementation, dispatch_kernel, with_gradient_of
from jaxattn.core.fp8_blocks import BLOCK, dequantize
from jaxattn.core.layers import LayerOf, number_to_check, taken_apart
from jaxattn.core.varying import refuse_explicit_axes
from jaxattn.kernels.moe.launch import FP8, mixture_of_experts_mosaic
from jaxattn.kernels.moe.route import LEAST, MOST_EXPERTS, Listed, route_mosaic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """How tokens choose experts.

    Attributes:
        experts: E.
        top_k: K, experts per token.
        scores: "softmax" over the experts, or "sigmoid" of each (DeepSeek-V3).
        groups: experts are divided into so many groups of neighbours.
        top_groups: only experts of so many groups are chosen.
        best_of_group: a group's score is the sum of so many of its best experts' scores.
        normalize: the chosen experts' weights sum to 1.
        scale: factor of the weights.

    Raises:
        ValueError: the numbers do not fit each other; they are named.
    """

    experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid"]
    groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    normalize: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores must be 'softmax' or 'sigmoid'; got {self.scores!r}")
        if self.groups < 1 or self.experts % self.groups:
            raise ValueError(f"experts={self.experts} must be a multiple of groups={self.groups}")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups={self.top_groups} must be from 1 to groups={self.groups}")
        size = self.experts // self.groups
        if not 1 <= self.best_of_group <= size:
            raise ValueError(
                f"best_of_group={self.best_of_group} must be from 1 to {size}, the experts of a "
                "group"
            )
        if not 1 <= self.top_k <= self.top_groups * size:
            raise ValueError(
                f"top_k={self.top_k} must be from 1 to {self.top_groups * size}, the experts of "
                f"top_groups={self.top_groups} groups"
            )

    @property
    def choice(self) -> dict[str, Any]:
        """The options of `route_mosaic`."""
        fields = (field.name for field in dataclasses.fields(self))
        options = {x: getattr(self, x) for x in fields if x not in ("experts", "scores")}
        return {"sigmoid": self.scores == "sigmoid", **options}


def route(
    logits: Float[Array, "*T E"],
    bias: Float[Array, " E"] | None,
    router: Router,
    *,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "*T K"], Float[Array, "*T K"]]:
    """The experts of each token, best first, and their weights in float32.

    Of equal scores the expert with the lower id comes first. A token whose logits are all NaN gets
    NaN for weights.

    Args:
        logits: of the router; they are taken as float32.
        bias: added to the scores that choose, not to the weights (DeepSeek-V3's
            `e_score_correction_bias`).
        implementation: None, "mosaic_gpu", "mosaic_gpu_interpret" or "xla". The kernel has a
            multiple of 32 experts, at most 1024. The gradient is "xla"'s, in reverse mode.

    Raises:
        TypeError, ValueError: an argument is no array, or its shape does not fit.
        Refusal: the named implementation refuses, and says why.
    """
    op = "route"
    check_array(op, "logits", logits)
    if logits.shape[-1] != router.experts:
        raise ValueError(f"route: logits {tuple(logits.shape)} must end in E = {router.experts}")
    if bias is not None and bias.shape != (router.experts,):
        raise ValueError(f"route: bias must be [E] = [{router.experts}], got {tuple(bias.shape)}")
    logits = logits.astype(jnp.float32)
    bias = None if bias is None else bias.astype(jnp.float32)

    def reference(logits: Array, bias: Array | None) -> tuple[Array, Array]:
        return _by_sorting(logits, bias, router)

    def mosaic(interpret: bool) -> tuple[Array, Array]:
        def kernel(logits: Array, bias: Array | None) -> Any:
            rows = logits.reshape(-1, router.experts)
            *chosen, _ = route_mosaic(rows, bias, **router.choice, interpret=interpret)
            return tuple(x.reshape(*logits.shape[:-1], router.top_k) for x in chosen)

        return with_gradient_of(reference, kernel)(logits, bias)

    with jax.named_scope(op):
        return dispatch_kernel(op, implementation, mosaic, lambda: reference(logits, bias))


def route_serves(experts: int) -> bool:
    """Whether the kernel has so many experts."""
    return experts % LEAST == 0 and 0 < experts <= MOST_EXPERTS


def _by_sorting(logits: Array, bias: Array | None, router: Router) -> tuple[Array, Array]:
    scores = jax.nn.softmax(logits) if router.scores == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if router.top_groups < router.groups:
        choice = _of_best_groups(choice, router)
    _, ids = lax.top_k(choice, router.top_k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if router.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids.astype(jnp.int32), weights * router.scale


def _of_best_groups(choice: Array, router: Router) -> Array:
    """-inf for experts of other groups than the best `top_groups`."""
    grouped = choice.reshape(*choice.shape[:-1], router.groups, -1)
    best, _ = lax.top_k(grouped, router.best_of_group)
    _, kept = lax.top_k(best.sum(-1), router.top_groups)
    mask = jax.nn.one_hot(kept, router.groups, dtype=jnp.bool_).any(-2)
    return jnp.where(mask[..., None], grouped, -jnp.inf).reshape(choice.shape)


def mixture_of_experts(
    x: Float[Array, "T F"],
    ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    gate_up: Float[Array, "*L E J F"],
    down: Float[Array, "*L E F I"],
    *,
    gate_up_scale: Float[Array, "*L E 2 I/128 F/128"] | None = None,
    down_scale: Float[Array, "*L E F/128 I/128"] | None = None,
    layer: int | Int[Array, ""] | LayerOf | None = None,
    arena: Arena | None = None,
    listed: Listed | None = None,
    implementation: Implementation | None = None,
) -> Any:
    """Sum over a token's experts of `weights * down(silu(gate(x)) * up(x))`, in float32.

    Operands of the products have the weights' dtype, and x's where the weights are FP8; sums are
    float32. A token's experts are added in the order of `ids`, so its result does not depend on the
    other tokens. A NaN in a token stays in that token.

    Padding: an id below 0 or from E on is no expert: it adds exactly 0, and nothing is read for it.
    The kernels read the weights of experts that somebody chose, once per tile of tokens, and no
    others'.

    The gradient is the "xla" implementation's, in reverse mode; with an arena there is none.

    Args:
        x: tokens, padding included.
        ids: the experts of each token; `route` gives them.
        weights: of those experts.
        gate_up: [E, J = 2 I, F] with gate's rows first, or a stack [L, E, 2 I, F] with `layer`.
        down: [E, F, I], or a stack.
        gate_up_scale: of float8_e4m3fn weights, which it multiplies: float32 of blocks of 128 rows
            and columns, gate's before up's; sizes are rounded up.
        down_scale: likewise.
        layer: index into the stacks, a Python int, a traced scalar, or the place in a pattern.
        arena: where the kernels keep what is between the products, regions of `scratch`.
        listed: the work list of these `ids` and this x, where `choose_experts` made it.
        implementation: None, "mosaic_gpu", "mosaic_gpu_interpret" or "xla". The kernels have F a
            multiple of 128, I of 64 (FP8: 128), and multiply bfloat16 or float16 numbers.

    Returns:
        float32 [T, F], and the arena if one was given.

    Raises:
        TypeError, ValueError: an argument's dtype or shape does not fit; it is named.
        Refusal: the named implementation refuses, and says why.
    """
    op = "mixture_of_experts"
    check_arena(op, arena)
    x, ids, weights, gate_up, down = _checked(op, x, ids, weights, gate_up, down, layer)
    scales: tuple[Array | None, ...] = _checked_scales(op, gate_up, down, gate_up_scale, down_scale)
    if layer is None:
        gate_up, down = gate_up[None], down[None]
        scales = tuple(None if scale is None else scale[None] for scale in scales)
    first, affine, number = taken_apart(0 if layer is None else layer)
    check_layer(op, "gate_up", gate_up.shape, number_to_check(0 if layer is None else layer))
    operands = (x, ids, weights, gate_up, down, *scales, jnp.asarray(first, jnp.int32))
    refuse_explicit_axes(op, *operands)

    def reference(*operands: Any) -> Array:
        return _by_ragged_products(*operands[:-1], layer=affine[0] * operands[-1] + affine[1])

    def mosaic(interpret: bool) -> Any:
        def kernels(x, ids, weights, gate_up, down, gate_up_scale, down_scale, first):
            return mixture_of_experts_mosaic(
                x, ids, weights, gate_up, down,
                gate_up_scale=gate_up_scale, down_scale=down_scale, layer=first, affine=affine,
                arena=arena, listed=listed, interpret=interpret,
            )  # fmt: skip

        function = kernels if arena is not None else with_gradient_of(reference, kernels)
        return function(*operands)

    def xla() -> Any:
        out = reference(*operands)
        return out if arena is None else (out, arena)

    with jax.named_scope(op):
        return dispatch_kernel(op, implementation, mosaic, xla)


def _checked(
    op: str, x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, layer: Any
) -> tuple[Array, ...]:
    arguments = Arguments(op)
    x = arguments.check("x", x, "T F")
    _, ids = arguments.integers("ids", ids, "T K")
    weights = arguments.check("weights", weights, "T K")
    stack = "" if layer is None else "L "
    for name, array, axes in (("gate_up", gate_up, "E J F"), ("down", down, "E F I")):
        check_array(op, name, array)
        if layer is None and len(array.shape) == 4:
            raise ValueError(f"{op}: {name} {tuple(array.shape)} is a stack of layers; give layer=")
        arguments.check(name, array, stack + axes, (*FLOATS, "float8_e4m3fn"))
    rows, width = gate_up.shape[-2], down.shape[-1]
    if rows != 2 * width:
        raise ValueError(
            f"{op}: gate_up {tuple(gate_up.shape)} must have 2 I = {2 * width} rows, of down "
            f"{tuple(down.shape)}"
        )
    if gate_up.dtype != down.dtype:
        raise TypeError(
            f"{op}: gate_up and down must have one dtype, got {gate_up.dtype} and {down.dtype}"
        )
    return x, ids, weights, jnp.asarray(gate_up), jnp.asarray(down)


def _checked_scales(
    op: str, gate_up: Array, down: Array, gate_up_scale: Any, down_scale: Any
) -> tuple[Array | None, Array | None]:
    """FP8 weights have scales, others none."""
    quantized = gate_up.dtype == FP8
    (*stack, features, width) = down.shape
    blocks = lambda size: -(-size // BLOCK)  # noqa: E731
    wanted = {
        "gate_up_scale": (gate_up_scale, (*stack, 2, blocks(width), blocks(features))),
        "down_scale": (down_scale, (*stack, blocks(features), blocks(width))),
    }
    for name, (scale, shape) in wanted.items():
        if (scale is not None) != quantized:
            needs = "need" if quantized else "have no"
            raise ValueError(f"{op}: {gate_up.dtype} weights {needs} {name}")
        if quantized and (tuple(scale.shape) != shape or scale.dtype != jnp.float32):
            raise ValueError(
                f"{op}: {name} must be float32 {list(shape)}, got {scale.dtype} {list(scale.shape)}"
            )
    return gate_up_scale, down_scale


def _by_ragged_products(
    x: Array,
    ids: Array,
    weights: Array,
    gate_up: Array,
    down: Array,
    gate_up_scale: Array | None,
    down_scale: Array | None,
    *,
    layer: Array,
) -> Array:
    """The plain-JAX path: tokens sorted by expert, each of which multiplies its own rows."""
    gate_up, down = gate_up[layer], down[layer]
    experts, rows, _ = gate_up.shape
    dtype = gate_up.dtype
    if gate_up_scale is not None and down_scale is not None:
        dtype = x.dtype
        halves = gate_up.reshape(experts, 2, rows // 2, -1)
        gate_up = dequantize(halves, gate_up_scale[layer], jnp.float32).reshape(gate_up.shape)
        down = dequantize(down, down_scale[layer], jnp.float32)
    valid = (ids >= 0) & (ids < experts)
    chosen = jnp.where(valid, ids, experts).reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.bincount(chosen, length=experts + 1)[:experts].astype(jnp.int32)
    tokens = x.astype(dtype)[order // ids.shape[1]]
    gate, up = jnp.split(_grouped(tokens, gate_up, sizes), 2, axis=1)
    out = _grouped((jax.nn.silu(gate) * up).astype(dtype), down, sizes)
    out = jnp.zeros_like(out).at[order].set(out).reshape(*ids.shape, -1)
    # A select: rows without an expert may hold anything.
    return jnp.where(valid[..., None], out * weights[..., None], 0).sum(1)


def _grouped(tokens: Array, weights: Array, sizes: Array) -> Array:
    """[rows, out] float32: each expert's rows times its [out, in] weights."""
    wide = jnp.float32 in (tokens.dtype, weights.dtype)
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return lax.ragged_dot_general(
        tokens.astype(weights.dtype),  # dequantized weights keep their float32
        weights,
        sizes,
        dimensions,
        precision=lax.Precision.HIGHEST if wide else None,
        preferred_element_type=jnp.float32,
    )
