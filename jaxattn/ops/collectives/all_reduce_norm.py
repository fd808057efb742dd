"""Fused all-reduce, residual sum and RMS norm between two layers on several GPUs.

    all_reduce_norm_layer    all GPUs have the same tokens, and each has a part of the addend
    norm_gather_layer        each GPU has its own tokens, and receives the norms of all tokens
    own_sum_norm_layer       each GPU has its own tokens, and receives all parts of their addend

Call these ops inside `jax.shard_map`. On Hopper GPUs of one process one kernel launch does
everything. Elsewhere XLA's all-reduce runs, followed by a norm. Decode steps of a model use the
kernel for the batch sizes that `DecoderModel.with_fused_sums` gives.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxattn.core.cache.symmetric_buffer import SymmetricBuffer
from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.layer_index import LayerIndex, split_layer_index
from jaxattn.core.numerics.rms_norm import rms_norm
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import FLOATS, check_layer, finite
from jaxattn.kernels.collectives.all_reduce_norm import Meeting, all_reduce_norm_mosaic


def all_reduce_norm_layer(
    x: Float[Array, "T F"],
    part: Float[Array, "T F"],
    weights: Float[Array, "L F"],
    mailbox: SymmetricBuffer,
    *,
    axes: Sequence[str],
    layer: int | Int[Array, ""] | LayerIndex,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T F"], Float[Array, "T F"], SymmetricBuffer]:
    """Returns (x + the sum of all GPUs' `part`, float32; the sum's RMS norm; the mailbox).

    Parts are sent in bfloat16. The kernel adds them in float32, in the order of the GPUs; XLA's
    all-reduce rounds their sum to bfloat16 once more.

    Args:
        x: float32 residual stream, the same on all GPUs.
        part: This GPU's part of the addend.
        weights: The norm weights of all layers.
        mailbox: The kernel's buffer, with as many features and at least T tokens. XLA leaves it
            unchanged.
        axes: The mesh axes of the GPUs. The kernel needs all axes of the mesh, in its order.
        layer: Index into the stack, a Python int, a traced scalar or a `LayerIndex`.
        dtype: Dtype of the norm. None means x's.
        implementation: "mosaic_gpu", "xla", or None for the best available. The kernel requires 2
            to 8 GPUs of one process and F a multiple of 256, at most 8192, and has no gradient.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    return _all_reduce_norm(
        "sum", x, part, weights, mailbox, axes, layer, eps, dtype, implementation
    )


def norm_gather_layer(
    x: Float[Array, "T F"],
    added: Float[Array, "T F"],
    weights: Float[Array, "L F"],
    mailbox: SymmetricBuffer,
    *,
    axes: Sequence[str],
    layer: int | Int[Array, ""] | LayerIndex,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T F"], Float[Array, "NT F"], SymmetricBuffer]:
    """Returns (x + added, float32; the RMS norms of all GPUs' tokens in GPU order; the mailbox).

    Each of N GPUs has its own T tokens. Norms are sent in bfloat16.

    Args:
        added: The complete addend of this GPU's tokens.

    Other arguments, limits and errors are those of `all_reduce_norm_layer`.
    """
    return _all_reduce_norm(
        "norm", x, added, weights, mailbox, axes, layer, eps, dtype, implementation
    )


def own_sum_norm_layer(
    x: Float[Array, "T F"],
    part: Float[Array, "NT F"],
    weights: Float[Array, "L F"],
    mailbox: SymmetricBuffer,
    *,
    axes: Sequence[str],
    layer: int | Int[Array, ""] | LayerIndex,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T F"], Float[Array, "T F"], SymmetricBuffer]:
    """Returns (x + the sum of all GPUs' parts for its tokens; the sum's RMS norm; the mailbox).

    Each of N GPUs has its own T tokens, and a part of the addend of all GPUs' tokens.

    Args:
        part: This GPU's part for all tokens, in GPU order.

    Other arguments, limits and errors are those of `all_reduce_norm_layer`.
    """
    return _all_reduce_norm(
        "own", x, part, weights, mailbox, axes, layer, eps, dtype, implementation
    )


def _all_reduce_norm(
    meeting: Meeting,
    x: Array,
    part: Array,
    weights: Array,
    mailbox: SymmetricBuffer,
    axes: Sequence[str],
    layer: int | Array | LayerIndex,
    eps: float,
    dtype: DTypeLike | None,
    implementation: Implementation | None,
) -> tuple[Array, Array, SymmetricBuffer]:
    op = {
        "sum": "all_reduce_norm_layer",
        "norm": "norm_gather_layer",
        "own": "own_sum_norm_layer",
    }[meeting]
    arguments, names = OpArguments(op), tuple(axes)
    gpus = lax.axis_size(names)
    x = arguments.check("x", x, "T F", ("float32",))
    part = arguments.check("part", part, "NT F" if meeting == "own" else "T F", FLOATS)
    weights = arguments.check("weights", weights, "L F", FLOATS)
    eps, tokens = finite(op, "eps", eps), x.shape[0]
    if meeting == "own" and len(part) != gpus * tokens:
        raise ValueError(
            f"{op}: part {part.shape} must have the tokens of {gpus} GPUs, and x {x.shape} those "
            "of one"
        )
    _, parts, most, features = mailbox.inbox.shape
    if parts != gpus or most < tokens or features != x.shape[1]:
        raise ValueError(
            f"{op}: the mailbox is for {parts} GPUs and {most} tokens of {features} features; x "
            f"{tuple(x.shape)} on {gpus} GPUs needs one of its own size"
        )
    out_dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    first, affine, number = split_layer_index(layer)
    check_layer(op, "weights", weights.shape, number)

    def mosaic(interpret: bool) -> tuple[Array, Array, SymmetricBuffer]:
        total, normed, *kept = all_reduce_norm_mosaic(
            x, part, weights, mailbox.inbox, mailbox.counts, mailbox.addresses,
            axes=names, layer=first, affine=affine, eps=eps, dtype=out_dtype, meeting=meeting,
            interpret=interpret,
        )  # fmt: skip
        return total, normed, SymmetricBuffer(kept[0], kept[1], mailbox.addresses)

    def xla() -> tuple[Array, Array, SymmetricBuffer]:
        sent = part.astype(jnp.bfloat16)
        match meeting:
            case "sum":
                added = lax.psum(sent, names)
            case "own":
                added = lax.psum_scatter(sent, names, tiled=True)
            case "norm":
                added = part
        total = x + added
        normed = rms_norm(total, weights[number], eps)
        if meeting == "norm":
            normed = lax.all_gather(normed.astype(jnp.bfloat16), names, tiled=True)
        return total, normed.astype(out_dtype), mailbox

    with jax.named_scope(op):
        return dispatch_kernel(op, implementation, mosaic, xla)
