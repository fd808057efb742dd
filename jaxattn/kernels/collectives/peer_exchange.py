"""Exchange of rows between GPUs, in one launch over peer memory: a warpgroup for each piece.

NCCL's launches cannot be in a CUDA graph, so that a layer with two of them is five graphs. Here a
GPU writes the data for another into that GPU's inbox, and copies what arrives out of its own.
Numbers are moved unchanged, whatever bits they have. `kernels/collectives/peer_transfer.py`
describes the inboxes and why they lose nothing.

Limits: 256 to 8192 numbers of 16 bits, a multiple of 256; 2 to 8 GPUs, which are all of the mesh,
in one process; an inbox below 2 GiB. Reference: `jaxattn.ops.collectives.peer_exchange`
(implementation="xla"); tests: tests/parallel/test_gpus_exchange.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal, without_gradient
from jaxattn.kernels.collectives import peer_transfer as peers
from jaxattn.kernels.hopper.build.launch import launch

MOST_FEATURES = 8192
# Loads of 16 bytes that a thread polls together: those of four GPUs' pieces of 4,608 numbers.
# Polled one GPU after another, each would take a poll of its own.
LOADS = 36


def supports_exchange(features: int, gpus: int) -> bool:
    """Whether the kernel supports pieces of `features` numbers between `gpus` GPUs."""
    return peers.supports_features(features, MOST_FEATURES) and 2 <= gpus <= peers.MOST_GPUS


def peer_exchange_mosaic(
    part: jax.Array,
    inbox: jax.Array,
    counts: jax.Array,
    addresses: jax.Array,
    *,
    axes: tuple[str, ...],
    room: int = 0,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (the received data, inbox, counts), as documented by
    `jaxattn.ops.collectives.peer_exchange`.

    Args:
        part: bfloat16 [T, 1, P, F] for all GPUs, or [T, N, P, F] with a piece for each.
        room: Zeros after the pieces of the N GPUs, as if from so many more GPUs.
    """
    op = "peer_exchange"
    peers.check(op, inbox, axes, interpret)
    rows, of_each, pieces, features = part.shape
    gpus = inbox.shape[1]
    if not supports_exchange(features, gpus) or not rows * pieces:
        raise Refusal(
            f"{op}: the kernel needs at least one piece, a multiple of "
            f"{peers.NUMBERS * peers.THREADS} numbers per piece, at most {MOST_FEATURES}, and 2 to "
            f"{peers.MOST_GPUS} GPUs; got part {part.shape} on {gpus} GPUs"
        )
    [part] = without_gradient(op, (part,))
    layout = peers.layout_of(features)

    def body(part_ref, addresses_ref, inbox_ref, counts_ref, out_ref) -> None:
        row, piece = lax.axis_index("row"), lax.axis_index("piece")
        place = row * pieces + piece
        call = peers.PeerTransfer(inbox_ref, counts_ref, addresses_ref, place, features)
        sent = [
            plgpu.load(part_ref.at[row, each, piece], layout=layout, optimized=False)
            for each in range(of_each)
        ]
        call.send(sent)
        nothing = plgpu.layout_cast(jnp.zeros((features,), jnp.bfloat16), layout)
        for gpu in range(gpus, gpus + room):
            out_ref.at[row, gpu, piece][...] = nothing
        for gpu, each in enumerate(call.receive(LOADS)):
            out_ref.at[row, gpu, piece][...] = each

    inbox_ref, counts_ref = jax.new_ref(inbox), jax.new_ref(counts)
    out: dict[str, Any] = launch(
        body,
        name="peer_exchange",
        grid={"row": rows, "piece": pieces},
        warpgroups=None,
        inputs={
            "part_ref": part,
            "addresses_ref": addresses,
            "inbox_ref": inbox_ref,
            "counts_ref": counts_ref,
        },
        outputs={
            "out_ref": jax.ShapeDtypeStruct((rows, gpus + room, pieces, features), jnp.bfloat16)
        },
        compiler_params=peers.COMPILER,
    )
    return out["out_ref"], jax.freeze(inbox_ref), jax.freeze(counts_ref)
