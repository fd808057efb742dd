"""All-reduce, residual sum and RMS norm in one launch: a warpgroup per token, over peer memory.

XLA's own all-reduce cannot be in a CUDA graph, and has two launches around it that convert and one
that norms. Here each GPU writes its part of a token into an inbox on every GPU, itself included,
and waits until every GPU has done so. It adds the parts in the order of the GPUs, so that all GPUs
get the same bits.

`kernels/collectives/peer_transfer.py` describes the inboxes and why they lose nothing.

Limits: 256 to 8192 features, a multiple of 256; 2 to 8 GPUs, which are all of the mesh, in one
process; an inbox below 2 GiB. Reference: `jaxattn.ops.collectives.all_reduce_norm`
(implementation="xla"); tests: tests/parallel/test_gpus_norm.py.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal, without_gradient
from jaxattn.kernels.collectives import peer_transfer as peers
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.linear.rms_norm import MOST_FEATURES

# The variants of a call. "sum" adds the parts of all GPUs, which have the same tokens. If each GPU
# has its own tokens, "norm" adds the GPU's own part and returns the norms of all, and "own" adds
# the parts that all GPUs have of its tokens.
type Meeting = Literal["sum", "norm", "own"]


def supports_all_reduce(features: int, gpus: int) -> bool:
    """Whether the kernel supports rows of `features` features on `gpus` GPUs."""
    return peers.supports_features(features, MOST_FEATURES) and 2 <= gpus <= peers.MOST_GPUS


def all_reduce_norm_mosaic(
    x: jax.Array,
    part: jax.Array,
    weights: jax.Array,
    inbox: jax.Array,
    counts: jax.Array,
    addresses: jax.Array,
    *,
    axes: tuple[str, ...],
    layer: jax.Array | int,
    affine: tuple[int, int] = (1, 0),
    eps: float,
    dtype: Any,
    meeting: Meeting = "sum",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (sum, its norm, inbox, counts), as documented by
    `jaxattn.ops.collectives.all_reduce_norm`.

    Args:
        part: [T, F], or [N * T, F] for a meeting "own".
        affine: (a, b): the layer is `a * layer + b`.
    """
    op = "all_reduce_norm_layer"
    peers.check(op, inbox, axes, interpret)
    tokens, features = x.shape
    gpus = inbox.shape[1]
    if not supports_all_reduce(features, gpus) or not tokens:
        raise Refusal(
            f"{op}: the kernel needs a multiple of {peers.NUMBERS * peers.THREADS} features, at "
            f"most {MOST_FEATURES}, at least one token, and 2 to {peers.MOST_GPUS} GPUs; got x "
            f"{x.shape} on {gpus} GPUs"
        )
    x, part, weights = without_gradient(op, (x, part, weights))
    layout = peers.layout_of(features)

    if meeting == "own":
        part = part.reshape(gpus, tokens, features)

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def body(
        x_ref,
        part_ref,
        weights_ref,
        layer_ref,
        addresses_ref,
        inbox_ref,
        counts_ref,
        sum_ref,
        out_ref,
    ) -> None:
        token = lax.axis_index("token")
        call = peers.PeerTransfer(inbox_ref, counts_ref, addresses_ref, token, features)

        def weight() -> jax.Array:
            return load(weights_ref.at[layer_ref[0] * affine[0] + affine[1]])

        def normed(values: jax.Array, weight: jax.Array) -> jax.Array:
            factor = lax.rsqrt(jnp.sum(values * values) * (1.0 / features) + eps)
            sum_ref.at[token][...] = values
            return values * factor * weight

        def parts() -> list[jax.Array]:
            match meeting:
                case "sum":
                    return [load(part_ref.at[token])]
                case "own":
                    return [load(part_ref.at[gpu, token]) for gpu in range(gpus)]
                case "norm":
                    return [normed(load(x_ref.at[token]) + load(part_ref.at[token]), weight())]

        call.send([each.astype(jnp.bfloat16) for each in parts()])
        if meeting != "norm":  # read while other GPUs' parts are in flight
            values, scales = load(x_ref.at[token]), weight()
        come = call.receive()
        if meeting == "norm":
            for gpu, each in enumerate(come):
                out_ref.at[gpu, token][...] = each.astype(dtype)
            return
        for each in come:
            values += each.astype(jnp.float32)
        out_ref.at[token][...] = normed(values, scales).astype(dtype)

    inbox_ref, counts_ref = jax.new_ref(inbox), jax.new_ref(counts)
    all_of_them = (gpus,) if meeting == "norm" else ()
    out = launch(
        body,
        name="all_reduce_norm",
        grid={"token": tokens},
        warpgroups=None,
        inputs={
            "x_ref": x,
            "part_ref": part,
            "weights_ref": weights,
            "layer_ref": jnp.asarray(layer, jnp.int32).reshape(1),
            "addresses_ref": addresses,
            "inbox_ref": inbox_ref,
            "counts_ref": counts_ref,
        },
        outputs={
            "sum_ref": jax.ShapeDtypeStruct(x.shape, jnp.float32),
            "out_ref": jax.ShapeDtypeStruct(all_of_them + x.shape, dtype),
        },
        compiler_params=peers.COMPILER,
    )
    normed = out["out_ref"].reshape(-1, features)
    return out["sum_ref"], normed, jax.freeze(inbox_ref), jax.freeze(counts_ref)
