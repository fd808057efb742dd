"""Products of tokens with a layer's matrices, which are read in place from their stacks.

    q, kv = linear_layer(x, (q_proj, kv_a_proj), layer=l)      x @ q_proj[l], x @ kv_a_proj[l]
    h = gated_layer(x, gate_proj, up_proj, layer=l)            silu(x @ gate) * (x @ up)
    y = heads_layer(x, weights, layer=l)                       x[:, h] @ weights[l, h] of each head

In a loop over layers, XLA's products take a layer's matrix out of the stack, in some cases by a
copy. With few tokens a product takes as long as reading its weights, and the kernel is made for
this case. XLA computes larger batches. A row's last bits therefore depend on the number of rows for
which a step was compiled, but not on the other rows. The gradient is XLA's.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxattn.core.dispatch import (
    Implementation,
    Refusal,
    dispatch_kernel,
    with_gradient_of,
)
from jaxattn.core.layer_index import LayerIndex, split_layer_index
from jaxattn.core.numerics.matmul import dot
from jaxattn.core.numerics.rope import RopeConfig, Rotation, rope
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import (
    FLOATS,
    check_array,
    check_dtype,
    check_features,
    check_layer,
)
from jaxattn.kernels.linear.cta import ROWS
from jaxattn.kernels.linear.linear import OP, linears_mosaic, refusal
from jaxattn.kernels.linear.rope_epilogue import DIMS, RopeEpilogueParams

# For a product of heads XLA pads fewer tokens to this number, and is faster with more.
FEW_TOKENS = 8

type Layer = int | Int[Array, ""] | LayerIndex


def linear_layer(
    x: Float[Array, "*T K"],
    weights: Sequence[Float[Array, "L K N"]],
    *,
    layer: Layer,
    biases: Sequence[Float[Array, "L N"]] | None = None,
    out_dtypes: Sequence[DTypeLike] | None = None,
    split: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*T N"], ...]:
    """Computes `x @ weight[layer] + bias[layer]` for each stack of weights, summed in float32.

    Args:
        x: Tokens, which are rounded to the weights' dtype.
        weights: Stacks of one dtype, with any N each.
        layer: Index into the stacks, a Python int, a traced scalar or a `LayerIndex`.
        biases: One stack of biases per stack of weights; numbers after the first N are ignored.
            None adds nothing.
        out_dtypes: Dtypes of the results. None means float32.
        split: Whether each stack multiplies its own K numbers of x, in order; x is then [*T, stacks
            * K].
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            The kernel requires 1 to 32 tokens (1 to 4 if a matrix is larger than 32 MiB), K and N
            multiples of 64, and bfloat16 or float16. "xla" recomputes its gradient.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    dtypes = [jnp.dtype(d) for d in out_dtypes or [jnp.float32] * len(weights)]
    return tuple(
        _linears(
            x, list(weights), layer, dtypes, biases=biases, implementation=implementation,
            split=split,
        )
    )  # fmt: skip


def gated_layer(
    x: Float[Array, "*T K"],
    gate: Float[Array, "L K N"],
    up: Float[Array, "L K N"],
    *,
    layer: Layer,
    out_dtype: DTypeLike = jnp.bfloat16,
    implementation: Implementation | None = None,
) -> Float[Array, "*T N"]:
    """Computes `silu(x @ gate[layer]) * (x @ up[layer])`, in float32 and rounded once.

    Arguments, limits and errors are those of `linear_layer`.
    """
    if gate.shape != up.shape:
        raise ValueError(
            f"gated_layer: gate {gate.shape} and up {up.shape} must have the same shape"
        )
    dtypes = [jnp.dtype(out_dtype)]
    found = _linears(x, [gate, up], layer, dtypes, implementation=implementation, gated=True)
    return found[0]


def heads_layer(
    x: Float[Array, "*T H K"],
    weights: Float[Array, "L H K N"],
    *,
    layer: Layer,
    rotary: tuple[Rotation, RopeConfig] | None = None,
    spare_heads: int = 0,
    implementation: Implementation | None = None,
) -> Float[Array, "*T H N"]:
    """Computes `x[..., h, :] @ weights[layer, h]` for each head, summed in float32, in x's dtype.

    Args:
        x: Tokens; heads after the first H are ignored.
        rotary: The tokens' rotation. x then has P more numbers per head, [*T, H, K + P], and the
            result contains them, rotated, after the product, [*T, H, N + P].
        spare_heads: Number of undefined heads appended to the result, for an op that reads heads in
            eights. The kernel supports them if N is a multiple of 128.

    Other arguments, limits and errors are those of `linear_layer`, with the K and N of a head. To
    rotate, the kernel requires P 64 and N a multiple of 128.
    """
    arguments = OpArguments("heads_layer")
    arguments.check("weights", weights, "L H K N", FLOATS)
    heads, inner, size = weights.shape[1:]
    num_rotated_dims = 0 if rotary is None else rotary[1].dim
    if x.shape[-2] < heads or x.shape[-1] != inner + num_rotated_dims:
        raise ValueError(
            f"heads_layer: x {tuple(x.shape)} must end in [H, K + P], with the K and at least the "
            f"H of weights {tuple(weights.shape)} and P {num_rotated_dims}"
        )
    first, affine, number = split_layer_index(layer)
    check_layer(arguments.op, "weights", weights.shape, number)

    angles = None if rotary is None else rotary[0].angles
    angles = None if angles is None else angles.reshape(-1, angles.shape[-1])

    def reference(tokens: Array, first: Array, weights: Array, angles: Array | None) -> list[Array]:
        weight = lax.dynamic_index_in_dim(weights, affine[0] * first + affine[1], keepdims=False)
        by_head = tokens.reshape(-1, *x.shape[-2:])[:, :heads]
        y = dot("thk,hkn->thn", by_head[..., :inner], weight).astype(x.dtype)
        if rotary is not None and angles is not None:
            rotated = rope(by_head[..., inner:], Rotation(angles), rotary[1])
            y = jnp.concatenate([y, rotated.astype(x.dtype)], axis=-1)
        return [jnp.pad(y, ((0, 0), (0, spare_heads), (0, 0))).reshape(len(tokens), -1)]

    def kernel(
        tokens: Array, first: Array, weights: Array, angles: Array | None, interpret: bool
    ) -> list[Array]:
        if rotary is not None and (num_rotated_dims != DIMS or size % ROWS):
            raise Refusal(
                f"heads_layer: the kernel rotates {DIMS} dims after N, which must be a multiple "
                f"of {ROWS}; got {num_rotated_dims} dims and N {size}"
            )
        if spare_heads and size % ROWS:
            raise Refusal(
                f"heads_layer: the kernel supports spare heads if N is a multiple of {ROWS}; got "
                f"{size}"
            )
        turn = None
        if rotary is not None and angles is not None:
            turn = RopeEpilogueParams(angles.astype(jnp.float32), rotary[1].interleaved)
        return linears_mosaic(
            tokens, [weights.reshape(-1, inner, size)], layer=first, affine=affine,
            out_dtypes=[x.dtype], heads=heads, spare_heads=spare_heads, rope=turn,
            interpret=interpret,
        )  # fmt: skip

    tokens = x.reshape(-1, x.shape[-2] * x.shape[-1]).astype(weights.dtype)
    operands = (tokens, jnp.asarray(first, jnp.int32), weights, angles)
    found = _dispatch("heads_layer", implementation, kernel, reference, operands)
    return found[0].reshape(*x.shape[:-2], heads + spare_heads, size + num_rotated_dims)


def kernel_serves(x: Array, weights: Sequence[Array], *, gated: bool = False) -> bool:
    """Returns whether the kernel supports these shapes and dtypes, x cast to the weights' dtype."""
    tokens = x.size // x.shape[-1] if x.size else 0
    return refusal((tokens, x.shape[-1]), weights[0].dtype, weights, gated=gated) is None


def _linears(
    x: Array,
    weights: list[Array],
    layer: Layer,
    out_dtypes: list,
    *,
    biases: Sequence[Array] | None = None,
    implementation: Implementation | None,
    gated: bool = False,
    split: bool = False,
) -> list[Array]:
    arguments, pieces = OpArguments(OP), len(weights) if split else 1
    if biases is not None and len(biases) != len(weights):
        raise ValueError(
            f"{OP}: there must be one bias for each of {len(weights)} weights, got {len(biases)}"
        )
    for place, weight in enumerate(weights):
        arguments.check(f"weights[{place}]", weight, f"L K N{place}", FLOATS)
        if split and x.shape[-1:] != (pieces * weight.shape[1],):
            raise ValueError(
                f"{OP}: with split, x {tuple(x.shape)} must end in {pieces} times K of "
                f"weights[{place}] {tuple(weight.shape)}"
            )
        if not split:
            check_features(OP, x, "K", f"weights[{place}]", weight.shape, 1)
        if weight.dtype != weights[0].dtype:
            raise TypeError(
                f"{OP}: weights must have the same dtype, got {weights[0].dtype} and {weight.dtype}"
            )
        if biases is None:
            continue
        bias = biases[place]
        check_array(OP, f"biases[{place}]", bias)
        check_dtype(OP, f"biases[{place}]", bias, *FLOATS)
        fits = bias.ndim == 2 and len(bias) == len(weight) and bias.shape[1] >= weight.shape[2]
        if not fits:
            raise ValueError(
                f"{OP}: biases[{place}] {tuple(bias.shape)} must be [L, N or more], with "
                f"L and N of weights[{place}] {tuple(weight.shape)}"
            )
    first, affine, number = split_layer_index(layer)
    check_layer(OP, "weights[0]", weights[0].shape, number)
    tokens = x.reshape(-1, x.shape[-1]).astype(weights[0].dtype)

    operands = (tokens, jnp.asarray(first, jnp.int32), *weights, *(biases or ()))
    count = len(weights)

    def kernel(tokens: Array, first: Array, *stacks: Array, interpret: bool) -> list[Array]:
        return linears_mosaic(
            tokens, stacks[:count], layer=first, affine=affine, out_dtypes=out_dtypes, gated=gated,
            split=split, biases=stacks[count:] or None, interpret=interpret,
        )  # fmt: skip

    def reference(tokens: Array, first: Array, *stacks: Array) -> list[Array]:
        layer, weights = affine[0] * first + affine[1], stacks[:count]
        xs = jnp.split(tokens, pieces, axis=-1) if split else [tokens] * len(weights)
        products = [_product(x, weight, layer) for x, weight in zip(xs, weights, strict=True)]
        if gated:
            products = [jax.nn.silu(products[0]) * products[1]]
        for place, each in enumerate(stacks[count:]):
            products[place] += each[layer, : products[place].shape[-1]].astype(jnp.float32)
        return [y.astype(dtype) for y, dtype in zip(products, out_dtypes, strict=True)]

    found = _dispatch(OP, implementation, kernel, reference, operands)
    return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in found]


def heads_serve(x: Array, weights: Array, num_rotated_dims: int = 0) -> bool:
    """Returns whether the kernel supports this `heads_layer` call and is faster than XLA.

    Args:
        num_rotated_dims: Number of dims of x that are rotated.
    """
    tokens = x.size // (x.shape[-2] * x.shape[-1]) if x.size else 0
    inner, size = weights.shape[-2:]
    stack = jax.ShapeDtypeStruct((1, inner, size), weights.dtype)
    if num_rotated_dims and (num_rotated_dims != DIMS or size % ROWS):
        return False
    return tokens <= FEW_TOKENS and not refusal((tokens, inner), x.dtype, [stack], least=ROWS)


def _dispatch(
    op: str,
    implementation: Implementation | None,
    kernel: Callable[..., list[Array]],
    reference: Callable[..., list[Array]],
    operands: tuple[Array | None, ...],
) -> list[Array]:
    def mosaic(interpret: bool) -> list[Array]:
        because = f"{op}: the kernel is for decoding and has no gradient; train with nn.Linear"
        return with_gradient_of(reference, partial(kernel, interpret=interpret), because=because)(
            *operands
        )

    with jax.named_scope(op):
        return dispatch_kernel(op, implementation, mosaic, lambda: reference(*operands))


def _product(x: Array, weights: Array, layer: Array | int) -> Array:
    weight = lax.dynamic_index_in_dim(weights, layer, keepdims=False)
    # XLA's default for float32 on a GPU is TF32, which is too coarse for a float32 model.
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(x, weight, precision=exact, preferred_element_type=jnp.float32)
