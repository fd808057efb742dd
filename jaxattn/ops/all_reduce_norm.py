"""Between two layers on several GPUs: the sum of their parts, the residual sum, and its RMS norm.

    all_reduce_norm_layer    GPUs have the same tokens, and a part each of what is added
    norm_gather_layer        GPUs have tokens of their own; each is given the norms of all
    own_sum_norm_layer       and then the parts of all of what is added to its own

It is called inside `jax.shard_map`. On Hopper GPUs of one process a kernel does all of it in one
launch; elsewhere XLA's all-reduce runs, and a norm after it. A model's decode steps have it, of as
many tokens as `DecoderModel.with_fused_sums` says.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxattn.core.arguments import Arguments
from jaxattn.core.checks import FLOATS, check_layer, finite
from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.layers import LayerOf, taken_apart
from jaxattn.core.norms import rms_norm
from jaxattn.kernels.all_reduce_norm import Meeting, all_reduce_norm_mosaic


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mailbox:
    """What the kernel keeps of a GPU from call to call: zeros at first, donated with each step.

    Other GPUs write here. It may be copied nowhere while a step runs.

    Attributes:
        inbox: int32 [2, N, T, F], the parts of N GPUs; calls take the two sides in turn.
        counts: int32 [1, T, 1], the number of calls that were for a token. No output of a step has
            such a shape: JAX would give an array's donated buffer to the first one that has.
        addresses: int32 [N + 1, 2], where the inbox of each GPU lies; see `addressed`. Then the
            GPU's own number.
    """

    inbox: Int[Array, "2 N T F"]
    counts: Int[Array, "1 T 1"]
    addresses: Int[Array, "N_1 2"]

    @classmethod
    def empty(cls, gpus: int, tokens: int, features: int) -> "Mailbox":
        """For calls of up to so many tokens, on one of the GPUs.

        Wait until those of all GPUs are there: what is written into one before is lost, and then
        the kernel waits for it, and at last ends the program with an error.
        """
        inbox = jnp.zeros((2, gpus, tokens, features), jnp.int32)
        return cls(inbox, jnp.zeros((1, tokens, 1), jnp.int32), jnp.zeros((gpus + 1, 2), jnp.int32))


def addressed(mailbox: Mailbox) -> Mailbox:
    """A mailbox with the addresses of its inboxes, which lie one after another on a mesh's GPUs.

    To be called once, on the host, when the inboxes are there. They must stay where they are: a
    step that uses them is given them donated, and gives them back.

    Args:
        mailbox: of all GPUs, each with one along the first axis.
    """
    of_gpus = mailbox.inbox.addressable_shards
    parts = sorted(of_gpus, key=lambda shard: shard.index[0].start or 0)
    places = np.array([shard.data.unsafe_buffer_pointer() for shard in parts], np.uint64)
    words = places.astype("<u8").view("<u4").reshape(-1, 2).astype(np.uint32).view(np.int32)
    tables = [np.concatenate([words, [[gpu, 0]]]) for gpu in range(len(parts))]
    table = np.concatenate(tables).astype(np.int32)
    where = mailbox.addresses.sharding
    placed = jax.make_array_from_callback(table.shape, where, lambda part: table[part])
    return dataclasses.replace(mailbox, addresses=placed)


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
        axes: the mesh axes of the GPUs; for the kernel, all axes of the mesh, in its order.
        layer: index into the stack, a Python int, a traced scalar, or the place in a pattern.
        dtype: of the norm; x's, if None.
        implementation: None, "mosaic_gpu" or "xla". The kernel is for 2 to 8 GPUs of one process.
            It has F a multiple of 256, at most 8192, and no gradient.

    Raises:
        ValueError, TypeError: an argument's dtype or shape does not fit; it is named.
        Refusal: the named implementation refuses, and says why.
    """
    return _met("sum", x, part, weights, mailbox, axes, layer, eps, dtype, implementation)


def norm_gather_layer(
    x: Float[Array, "T F"],
    added: Float[Array, "T F"],
    weights: Float[Array, "L F"],
    mailbox: Mailbox,
    *,
    axes: Sequence[str],
    layer: int | Int[Array, ""] | LayerOf,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T F"], Float[Array, "NT F"], Mailbox]:
    """(x + added, float32; the RMS norms of all tokens, one GPU's after another; the mailbox).

    Each of N GPUs has T tokens of its own. Norms are sent in bfloat16.

    Args:
        added: what is added to x, this GPU's too.

    Other arguments, limits and errors are those of `all_reduce_norm_layer`.
    """
    return _met("norm", x, added, weights, mailbox, axes, layer, eps, dtype, implementation)


def own_sum_norm_layer(
    x: Float[Array, "T F"],
    part: Float[Array, "NT F"],
    weights: Float[Array, "L F"],
    mailbox: Mailbox,
    *,
    axes: Sequence[str],
    layer: int | Int[Array, ""] | LayerOf,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T F"], Float[Array, "T F"], Mailbox]:
    """(x + the sum of all GPUs' parts of its tokens; its RMS norm; the mailbox).

    Each of N GPUs has T tokens of its own, and a part of what is added to the tokens of all.

    Args:
        part: of all tokens, one GPU's after another.

    Other arguments, limits and errors are those of `all_reduce_norm_layer`.
    """
    return _met("own", x, part, weights, mailbox, axes, layer, eps, dtype, implementation)


def _met(
    meeting: Meeting,
    x: Array,
    part: Array,
    weights: Array,
    mailbox: Mailbox,
    axes: Sequence[str],
    layer: int | Array | LayerOf,
    eps: float,
    dtype: DTypeLike | None,
    implementation: Implementation | None,
) -> tuple[Array, Array, Mailbox]:
    op = {
        "sum": "all_reduce_norm_layer",
        "norm": "norm_gather_layer",
        "own": "own_sum_norm_layer",
    }[meeting]
    arguments, names = Arguments(op), tuple(axes)
    gpus = lax.axis_size(names)
    x = arguments.check("x", x, "T F", ("float32",))
    part = arguments.check("part", part, "NT F" if meeting == "own" else "T F", FLOATS)
    weights = arguments.check("weights", weights, "L F", FLOATS)
    eps, tokens = finite(op, "eps", eps), x.shape[0]
    if meeting == "own" and len(part) != gpus * tokens:
        raise ValueError(
            f"{op}: part {part.shape} must have the tokens of {gpus} GPUs, and x {x.shape} has "
            f"those of one"
        )
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
            x, part, weights, mailbox.inbox, mailbox.counts, mailbox.addresses,
            axes=names, layer=first, affine=affine, eps=eps, dtype=out_dtype, meeting=meeting,
            interpret=interpret,
        )  # fmt: skip
        return total, normed, Mailbox(kept[0], kept[1], mailbox.addresses)

    def xla() -> tuple[Array, Array, Mailbox]:
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
