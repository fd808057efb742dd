"""The exchange of rows between the GPUs of a mesh, as an all-gather or an all-to-all.

Call the op inside `jax.shard_map`. On Hopper GPUs of one process one kernel launch does it, which a
CUDA graph can capture. Elsewhere XLA's collectives run.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxattn.core.cache.symmetric_buffer import SymmetricBuffer
from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.kernels.collectives.peer_exchange import peer_exchange_mosaic


def peer_exchange(
    part: Float[Array, "T M P F"],
    mailbox: SymmetricBuffer,
    *,
    axes: Sequence[str],
    room: int = 0,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T N_room P F"], SymmetricBuffer]:
    """Returns (the rows that each of N GPUs sent here, the mailbox), bit for bit.

    Args:
        part: Rows of a 16-bit dtype: T rows in P pieces. M is 1 to send the same to all GPUs, or N
            to send `part[:, n]` to GPU n.
        mailbox: The kernel's buffer, with at least T * P tokens and F features. XLA leaves it
            unchanged. Calls that share it may send other T, P and F.
        room: Number of additional GPUs' worth of zeros appended to the result.
        axes: The mesh axes of the GPUs. The kernel needs all axes of the mesh, in its order.
        implementation: "mosaic_gpu", "xla", or None for the best available. The kernel requires 2
            to 8 GPUs of one process and F a multiple of 256, at most 8192, and has no gradient.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    op, names = "peer_exchange", tuple(axes)
    gpus = lax.axis_size(names)
    part = OpArguments(op).check("part", part, "T M P F", ("bfloat16", "float16"))
    rows, of_each, pieces, features = part.shape
    if of_each not in (1, gpus):
        raise ValueError(f"{op}: part {part.shape} must have M = 1 or {gpus}, the number of GPUs")
    _, parts, most, widest = mailbox.inbox.shape
    if parts != gpus or most < rows * pieces or widest < features:
        raise ValueError(
            f"{op}: the mailbox is for {parts} GPUs and {most} tokens of {widest} features; part "
            f"{part.shape} on {gpus} GPUs needs {gpus}, {rows * pieces} and {features}"
        )

    def mosaic(interpret: bool) -> tuple[Array, SymmetricBuffer]:
        bits = lax.bitcast_convert_type(part, jnp.bfloat16)
        met, inbox, counts = peer_exchange_mosaic(
            bits, mailbox.inbox, mailbox.counts, mailbox.addresses,
            axes=names, room=room, interpret=interpret,
        )  # fmt: skip
        met = lax.bitcast_convert_type(met, part.dtype)
        return met, SymmetricBuffer(inbox, counts, mailbox.addresses)

    def xla() -> tuple[Array, SymmetricBuffer]:
        bits = lax.bitcast_convert_type(part, jnp.uint16)
        if of_each == 1:
            met = lax.all_gather(bits[:, 0], names, axis=1)
        else:
            met = lax.all_to_all(bits, names, split_axis=1, concat_axis=1, tiled=True)
        met = jnp.pad(met, ((0, 0), (0, room), (0, 0), (0, 0)))
        return lax.bitcast_convert_type(met, part.dtype), mailbox

    with jax.named_scope(op):
        return dispatch_kernel(op, implementation, mosaic, xla)
