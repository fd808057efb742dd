"""Between two layers on several GPUs: the sum of their parts, the residual sum, and its RMS norm.

It is called inside `jax.shard_map`. On Hopper GPUs of one process a kernel does all of it in one
launch; elsewhere XLA's all-reduce runs, and a norm after it. A model asks for it by
`DecoderModel.with_fused_sums`.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Int

from jaxattn.core.checks import FLOATS, Arguments, check_layer, finite
from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.layers import LayerOf, taken_apart
from jaxattn.core.norms import rms_norm
from jaxattn.kernels.all_reduce_norm import all_reduce_norm_mosaic


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mailbox:
    """What the kernel keeps of a GPU from call to call: zeros at first, donated with each step.

    Other GPUs write here. It may be copied nowhere while a step runs.

    Attributes:
        inbox: bfloat16 [2, N, T, F], the parts of N GPUs; calls take the two sides in turn.
        counts: int32 [2, T], of each token the parts that came, and the calls that it was in.
    """

    inbox: BFloat16[Array, "2 N T F"]
    counts: Int[Array, "2 T"]

    @classmethod
    def empty(cls, gpus: int, tokens: int, features: int) -> "Mailbox":
        """For calls of up to so many tokens, on one of the GPUs.

        Wait until those of all GPUs are there: what is written into one before is lost, and then
        the kernel waits for it without end.
        """
        inbox = jnp.zeros((2, gpus, tokens, features), jnp.bfloat16)
        return cls(inbox, jnp.zeros((2, tokens), jnp.int32))


def all_reduce_norm_layer(
    x: Float[Array, "T F"],
    part: Float[Array, "T F"],
    weights: Float[Array, "L F"],
    mailbox: Mailbox,
    *,
    axes: Sequence[str],
    layer: int | Int[Array, ""] | LayerOf,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T F"], Float[Array, "T F"], Mailbox]:
    """(x + the sum of all GPUs' `part`, float32; its RMS norm by `weights[layer]`; the mailbox).

    Parts are sent in bfloat16. The kernel adds them in float32, in the order of the GPUs; XLA's
    all-reduce rounds their sum to bfloat16 once more.

    Args:
        x: float32, the residual stream, the same on all GPUs.
        part: what this GPU adds to it.
        weights: all layers'.
        mailbox: the kernel's, of as many features and at least T tokens; XLA leaves it as it is.
        axes: the mesh axes of the GPUs; for the kernel, all axes of the mesh.
        layer: index into the stack, a Python int, a traced scalar, or the place in a pattern.
        dtype: of the norm; x's, if None.
        implementation: None, "mosaic_gpu" or "xla". The kernel is for 2 to 8 GPUs of one process.
            It has F a multiple of 128, at most 8192, and no gradient.

    Raises:
        ValueError, TypeError: an argument's dtype or shape does not fit; it is named.
        Refusal: the named implementation refuses, and says why.
    """
    op = "all_reduce_norm_layer"
    arguments = Arguments(op)
    x = arguments.check("x", x, "T F", ("float32",))
    part = arguments.check("part", part, "T F", FLOATS)
    weights = arguments.check("weights", weights, "L F", FLOATS)
    eps, names = finite(op, "eps", eps), tuple(axes)
    tokens, gpus = x.shape[0], lax.axis_size(names)
    _, parts, most, features = mailbox.inbox.shape
    if parts != gpus or most < tokens or features != x.shape[1]:
        raise ValueError(
            f"{op}: the mailbox is of {parts} GPUs and {most} tokens of {features} features; x "
            f"{tuple(x.shape)} on {gpus} GPUs needs one of its own size"
        )
    out_dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    first, affine, number = taken_apart(layer)
    check_layer(op, "weights", weights.shape, number)

    def mosaic(interpret: bool) -> tuple[Array, Array, Mailbox]:
        total, normed, *kept = all_reduce_norm_mosaic(
            x, part, weights, mailbox.inbox, mailbox.counts,
            axes=names, layer=first, affine=affine, eps=eps, dtype=out_dtype, interpret=interpret,
        )  # fmt: skip
        return total, normed, Mailbox(*kept)

    def xla() -> tuple[Array, Array, Mailbox]:
        total = x + lax.psum(part.astype(jnp.bfloat16), names)
        return total, rms_norm(total, weights[number], eps).astype(out_dtype), mailbox

    with jax.named_scope(op):
        return dispatch_kernel(op, implementation, mosaic, xla)
