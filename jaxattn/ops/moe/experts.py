"""Mixture of experts: each token goes through the experts that the router chose for it.

    ids, weights = route(logits, bias, router)          [T, K] each
    y = mixture_of_experts(x, ids, weights, gate_up, down)

Weights have the layout of checkpoints, [out, in], with gate's rows before up's. The kernels read
them in place; XLA copies a layer's experts out of the stack. routing.py has `route`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxattn.arena import Arena
from jaxattn.core.dispatch import (
    Implementation,
    dispatch_kernel,
    with_gradient_of,
)
from jaxattn.core.layer_index import LayerIndex, checkable_layer, split_layer_index
from jaxattn.core.numerics import four_bit_tiles
from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.core.numerics.fp8_block_scaling import BLOCK, dequantize
from jaxattn.core.numerics.swiglu import ClampedSwiGLU, swiglu
from jaxattn.core.reverse_mode import in_reverse_mode_only
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import FLOATS, check_arena, check_array, check_layer
from jaxattn.core.validation.varying_axes import refuse_explicit_axes
from jaxattn.kernels.moe.backward.launch import (
    ExpertOperands,
    forward_with_residuals,
    gradients,
)
from jaxattn.kernels.moe.launch import FP8, mixture_of_experts_mosaic
from jaxattn.kernels.moe.routing.router import RoutedToken


def mixture_of_experts(
    x: Float[Array, "T F"],
    ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    gate_up: Float[Array, "*L E J F"] | UInt8[Array, "*L E 2 r c B"],
    down: Float[Array, "*L E F I"] | UInt8[Array, "*L E r c B"],
    *,
    gate_up_scale: Float[Array, "*L E 2 I/128 F/128"] | None = None,
    down_scale: Float[Array, "*L E F/128 I/128"] | None = None,
    gate_up_bias: Float[Array, "*L E J"] | None = None,
    down_bias: Float[Array, "*L E F"] | None = None,
    activation: ClampedSwiGLU | None = None,
    form: FourBitFormat | None = None,
    layer: int | Int[Array, ""] | LayerIndex | None = None,
    arena: Arena | None = None,
    listed: RoutedToken | None = None,
    apart: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Returns the sum over a token's experts of `weights * down(activation(gate(x), up(x)))`.

    Operands of the products have the weights' dtype, or x's if the weights are quantized; sums are
    float32. With 1,024 tokens or more and no arena, the kernels round each expert's output to that
    dtype before they weight and add it, except for 4-bit weights. A token's experts are added in
    the order of `ids`, so its result does not depend on other tokens. A NaN in a token stays in
    that token.

    Padding: an id below 0 or from E on is no expert; it adds exactly 0, and nothing is read for it.
    The kernels read only the weights of chosen experts, once per tile of tokens.

    The reverse-mode gradient has kernels too, for x, `weights` (and through them the router), both
    products' weights, and the biases. An expert without tokens gets exact zeros, and gradients are
    bitwise reproducible. With quantized weights XLA computes the gradient; with an arena there is
    none.

    Args:
        x: Tokens, padding included.
        ids: The experts of each token, as `route` returns them.
        weights: The routing weights of those experts.
        gate_up: Weights [E, J = 2 I, F] with gate's rows first, or a stack [L, E, 2 I, F] with
            `layer`.
        down: Weights [E, F, I], or a stack.
        gate_up_scale: float32 factors of float8_e4m3fn weights, one per block of 128 rows and
            columns, gate's before up's; block counts are rounded up.
        down_scale: The same for `down`.
        gate_up_bias, down_bias: Biases added to the products, both or none, or stacks of them.
        activation: The activation of gate and up. None means silu(gate(x)) * up(x).
        form: Format of 4-bit weights, which are tiles (`core.numerics.four_bit_tiles`): gate_up [E,
            2, I / 64, F / C, bytes] and down [E, F / 64, I / C, bytes], or stacks. Each weight is
            rounded to x's dtype once.
        layer: Index into the stacks, a Python int, a traced scalar or a `LayerIndex`.
        arena: The arena in which the kernels keep the intermediates between the products, in
            regions of `scratch`.
        listed: The kernels' work list for these `ids` and this x, if `choose_experts` returned one.
            None means that the op creates it.
        apart: Whether the kernels leave the sum over experts to the next op. Ignored without an
            arena. The result is then an `ExpertOutputs`, whose `total` computes the array from the
            arena's current contents.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            The kernels require F and I to be multiples of 64 (FP8: 128), and multiply bfloat16 or
            float16 numbers.

    Returns:
        float32 [T, F], and the arena if one was given.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    op = "mixture_of_experts"
    check_arena(op, arena)
    if not isinstance(listed, RoutedToken | None):
        raise TypeError(
            f"{op}: listed must be a result of choose_experts, got {type(listed).__name__}"
        )
    x, ids, weights, gate_up, down = _checked(op, x, ids, weights, gate_up, down, layer, form)
    if not isinstance(activation, ClampedSwiGLU | None):
        raise TypeError(
            f"{op}: activation must be a ClampedSwiGLU or None, got {type(activation).__name__}"
        )
    rows = [shape[:-1] for shape in _matrices(gate_up, down, form)]
    scales_and_biases: tuple[Array | None, ...] = (
        *_checked_scales(op, gate_up, down, gate_up_scale, down_scale),
        *_checked_biases(op, rows, gate_up_bias, down_bias),
    )
    if layer is None:
        gate_up, down = gate_up[None], down[None]
        scales_and_biases = tuple(
            None if each is None else each[None] for each in scales_and_biases
        )
    first, affine, number = split_layer_index(0 if layer is None else layer)
    check_layer(op, "gate_up", gate_up.shape, checkable_layer(0 if layer is None else layer))
    operands = (x, ids, weights, gate_up, down, *scales_and_biases, jnp.asarray(first, jnp.int32))
    refuse_explicit_axes(op, *operands)

    def reference(*operands: Any) -> Array:
        number = affine[0] * operands[-1] + affine[1]
        return _by_ragged_products(
            *operands[:-1], layer=number, activation=activation or swiglu, form=form
        )

    def mosaic(interpret: bool) -> Any:
        def kernels(x, ids, weights, gate_up, down, *scales_and_biases):
            *scales, gate_up_bias, down_bias, first = scales_and_biases
            return mixture_of_experts_mosaic(
                x, ids, weights, gate_up, down,
                gate_up_scale=scales[0], down_scale=scales[1], gate_up_bias=gate_up_bias,
                down_bias=down_bias, activation=activation, form=form, layer=first, affine=affine,
                arena=arena, listed=listed, apart=apart and arena is not None, interpret=interpret,
            )  # fmt: skip

        if arena is not None:
            return kernels(*operands)
        if gate_up.dtype == FP8 or form is not None:
            because = f"{op}: the kernels have no gradient with quantized weights"
            return with_gradient_of(reference, kernels, because=because)(*operands)
        options: dict[str, Any] = {
            "activation": activation, "affine": affine, "interpret": interpret,
        }  # fmt: skip

        def forward(x, ids, weights, gate_up, down, *scales_and_biases):
            *_, gate_up_bias, down_bias, first = scales_and_biases
            expert_operands = ExpertOperands(x, weights, gate_up, down, gate_up_bias, down_bias)
            return forward_with_residuals(expert_operands, ids, layer=first, **options)

        def backward(residuals, cotangent):
            x, weights, gate_up, down, *biases = gradients(residuals, cotangent, **options)
            return x, None, weights, gate_up, down, None, None, *biases, None

        differentiable = jax.custom_vjp(kernels)
        differentiable.defvjp(forward, backward)
        instead = "pass implementation='xla'"
        return in_reverse_mode_only(op, differentiable, instead=instead)(*operands)

    def xla() -> Any:
        out = reference(*operands)
        return out if arena is None else (out, arena)

    with jax.named_scope(op):
        return dispatch_kernel(op, implementation, mosaic, xla)


def _checked(
    op: str,
    x: Any,
    ids: Any,
    weights: Any,
    gate_up: Any,
    down: Any,
    layer: Any,
    form: FourBitFormat | None,
) -> tuple[Array, ...]:
    arguments = OpArguments(op)
    x = arguments.check("x", x, "T F")
    _, ids = arguments.integers("ids", ids, "T K")
    weights = arguments.check("weights", weights, "T K")
    stack = "" if layer is None else "L "
    if form is not None:
        _check_tiles(op, arguments, x, gate_up, down, stack, form)
        return x, ids, weights, jnp.asarray(gate_up), jnp.asarray(down)
    for name, array, axes in (("gate_up", gate_up, "E J F"), ("down", down, "E F I")):
        check_array(op, name, array)
        if layer is None and len(array.shape) == 4:
            raise ValueError(f"{op}: {name} {tuple(array.shape)} is a stack of layers; give layer=")
        arguments.check(name, array, stack + axes, (*FLOATS, "float8_e4m3fn"))
    rows, width = gate_up.shape[-2], down.shape[-1]
    if rows != 2 * width:
        raise ValueError(
            f"{op}: gate_up {tuple(gate_up.shape)} must have 2 I = {2 * width} rows for down "
            f"{tuple(down.shape)}"
        )
    if gate_up.dtype != down.dtype:
        raise TypeError(
            f"{op}: gate_up and down must have one dtype, got {gate_up.dtype} and {down.dtype}"
        )
    return x, ids, weights, jnp.asarray(gate_up), jnp.asarray(down)


def _check_tiles(
    op: str, arguments: OpArguments, x: Any, gate_up: Any, down: Any, stack: str, form: Any
) -> None:
    """Raises unless both 4-bit weights consist of tiles of matching sizes."""
    if not isinstance(form, FourBitFormat):
        raise TypeError(f"{op}: form must be a FourBitFormat or None, got {type(form).__name__}")
    for name, array, axes in (("gate_up", gate_up, "E two r c B"), ("down", down, "E m n B")):
        check_array(op, name, array)
        arguments.check(name, array, stack + axes, ("uint8",))
    features, width = form.matrix(down.shape)
    wanted = {
        "gate_up": (gate_up, (2, width // four_bit_tiles.ROWS, features // form.columns)),
        "down": (down, (features // four_bit_tiles.ROWS, width // form.columns)),
    }
    for name, (array, sizes) in wanted.items():
        shape, whole = (*sizes, form.tile_bytes), form.fits(width, features)
        if tuple(array.shape[-len(shape) :]) != shape or x.shape[-1] != features or not whole:
            raise ValueError(
                f"{op}: {name} {tuple(array.shape)} must end in {list(shape)}, tiles of F = "
                f"{x.shape[-1]} and I = {width} in {form}"
            )


def _matrices(
    gate_up: Array, down: Array, form: FourBitFormat | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of the weights as matrices."""
    if form is None:
        return gate_up.shape, down.shape
    features, width = form.matrix(down.shape)
    stack = down.shape[:-3]
    return (*stack, 2 * width, features), (*stack, features, width)


def _checked_scales(
    op: str, gate_up: Array, down: Array, gate_up_scale: Any, down_scale: Any
) -> tuple[Array | None, Array | None]:
    """Returns the scales; raises unless FP8 weights have them and other weights have none."""
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


def _checked_biases(
    op: str, rows: list[tuple[int, ...]], gate_up_bias: Any, down_bias: Any
) -> tuple[Array | None, Array | None]:
    """Returns the biases; raises unless both products have them or neither does."""
    if gate_up_bias is None and down_bias is None:
        return None, None
    found = []
    for name, bias, shape in (
        ("gate_up_bias", gate_up_bias, rows[0]), ("down_bias", down_bias, rows[1])
    ):  # fmt: skip
        if bias is None:
            raise ValueError(f"{op}: give both biases or neither; {name} is None")
        check_array(op, name, bias)
        if tuple(bias.shape) != shape or bias.dtype not in map(jnp.dtype, FLOATS):
            raise ValueError(
                f"{op}: {name} must be floats {list(shape)}, got {bias.dtype} {list(bias.shape)}"
            )
        found.append(jnp.asarray(bias))
    return found[0], found[1]


def _by_ragged_products(
    x: Array,
    ids: Array,
    weights: Array,
    gate_up: Array,
    down: Array,
    gate_up_scale: Array | None,
    down_scale: Array | None,
    gate_up_bias: Array | None,
    down_bias: Array | None,
    *,
    layer: Array,
    activation: Callable[[Array, Array], Array],
    form: FourBitFormat | None = None,
) -> Array:
    """The plain-JAX path, which sorts tokens by expert; each expert multiplies its own rows."""
    gate_up, down = gate_up[layer], down[layer]
    if form is not None:
        gate_up, down = (four_bit_tiles.dequantize(w, form, x.dtype) for w in (gate_up, down))
        gate_up = gate_up.reshape(len(gate_up), -1, gate_up.shape[-1])
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
    expert = jnp.minimum(chosen[order], experts - 1)

    def product(x: Array, weights: Array, bias: Array | None) -> Array:
        y = _grouped(x, weights, sizes)
        return y if bias is None else y + bias[layer].astype(jnp.float32)[expert]

    gate, up = jnp.split(product(tokens, gate_up, gate_up_bias), 2, axis=1)
    out = product(activation(gate, up).astype(dtype), down, down_bias)
    out = jnp.zeros_like(out).at[order].set(out).reshape(*ids.shape, -1)
    # A select, because rows without an expert may hold anything.
    return jnp.where(valid[..., None], out * weights[..., None], 0).sum(1)


def _grouped(tokens: Array, weights: Array, sizes: Array) -> Array:
    """Returns each expert's rows times its [out, in] weights, float32 [rows, out]."""
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
