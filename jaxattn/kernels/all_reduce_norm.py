"""Sum over GPUs, residual sum and RMS norm in one launch: a warpgroup a token, over peer memory.

XLA's own all-reduce is a launch that no CUDA graph holds, between two that convert and one that
norms. Here each GPU writes its part of a token into an inbox on every GPU, itself included, and
then the number of the call. Then it waits until every GPU has written this number. It adds the
parts in the order of the GPUs, so that all GPUs have the same bits.

    inbox   bfloat16 [2, N, T, F]   the parts of N GPUs; calls take its two sides in turn
    counts  int32 [N, T]            of each token: the calls whose parts have come, from each GPU

A GPU writes into a side again only after all parts of the call between have come. Whoever has sent
one of these has read the side before. Each count has one writer. A sum over GPUs would not show
whether a late GPU's part is in it, or a fast GPU's part of the next call. Counts go on from call to
call, so nothing is reset. If a peer never runs, the kernel waits for its part without end.

Limits: 128 to 8192 features, a multiple of 128; 2 to 8 GPUs, which are all of the mesh, in one
process; an inbox below 2 GiB. Reference: `jaxattn.ops.all_reduce_norm` (implementation="xla");
tests: tests/parallel/test_two_gpus_norm.py.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal, without_gradient
from jaxattn.kernels.hopper.launch import launch
from jaxattn.kernels.hopper.machine import require_hopper
from jaxattn.kernels.hopper.mlir import arith, ir, scf, utils
from jaxattn.kernels.hopper.registers import (
    Thread,
    asm,
    i32,
    plus,
    pointer,
    single,
    store,
    times,
    word,
)
from jaxattn.kernels.rms_norm import MOST_FEATURES, THREADS, norms_features

MOST_GPUS = 8
# What a call does. "sum" adds the parts of all GPUs, which have the same tokens. Where each has
# tokens of its own, "norm" adds the GPU's own part and gives the norms of all, and "own" adds the
# parts that all GPUs have of its tokens.
type Meeting = Literal["sum", "norm", "own"]
BYTES = 2  # of a number that is sent
MOST_BYTES = 2**31 - 1  # of the inbox, whose places are words
SPLAT, PLAIN = plgpu.Layout.WG_SPLAT, plgpu.RefType()


def meets(features: int, gpus: int) -> bool:
    """Whether the kernel sums rows of so many features over so many GPUs."""
    return norms_features(features) and 2 <= gpus <= MOST_GPUS


def all_reduce_norm_mosaic(
    x: jax.Array,
    part: jax.Array,
    weights: jax.Array,
    inbox: jax.Array,
    counts: jax.Array,
    *,
    axes: tuple[str, ...],
    layer: jax.Array | int,
    affine: tuple[int, int] = (1, 0),
    eps: float,
    dtype: Any,
    meeting: Meeting = "sum",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(sum, its norm, inbox, counts), as `jaxattn.ops.all_reduce_norm` documents it.

    Args:
        part: [T, F], or [N * T, F] of a meeting "own".
        affine: (a, b): the layer is `a * layer + b`.
    """
    op = "all_reduce_norm_layer"
    if interpret:
        raise Refusal(f"{op}: JAX's interpreter knows no memory of peers")
    require_hopper(op, interpret=False)
    if (processes := jax.process_count()) > 1:
        raise Refusal(f"{op}: the kernel's GPUs are of one process; these are of {processes}")
    mesh = jax.sharding.get_abstract_mesh()
    if axes != mesh.axis_names:  # a GPU's number there names its memory
        raise Refusal(
            f"{op}: the kernel needs all axes of the mesh, in its order; got {axes} of "
            f"{dict(mesh.shape)}"
        )
    tokens, features = x.shape
    gpus = inbox.shape[1]
    if inbox.size * BYTES > MOST_BYTES:
        raise Refusal(
            f"{op}: the kernel's inbox has less than 2 GiB; inbox {inbox.shape} of the mailbox has "
            f"{inbox.size * BYTES} bytes; make the mailbox for fewer tokens"
        )
    if not meets(features, gpus) or not tokens:
        raise Refusal(
            f"{op}: the kernel has a multiple of {THREADS} features, at most {MOST_FEATURES}, some "
            f"tokens, and 2 to {MOST_GPUS} GPUs; got x {x.shape} on {gpus} GPUs"
        )
    x, part, weights = without_gradient(op, (x, part, weights))
    vector = next(n for n in (8, 4, 2, 1) if features % (n * THREADS) == 0)
    layout = plgpu.Layout.WG_STRIDED((features,), vec_size=vector)

    if meeting == "own":
        part = part.reshape(gpus, tokens, features)

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def body(
        x_ref, part_ref, weights_ref, layer_ref, inbox_ref, counts_ref, sum_ref, out_ref
    ) -> None:
        token, own = lax.axis_index("token"), lax.axis_index(axes)
        call = counts_ref[own, token] + 1
        side = call & 1  # of negative numbers, which follow the largest, too

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

        sent = [each.astype(jnp.bfloat16) for each in parts()]
        places = PLAIN, PLAIN, SPLAT, SPLAT, SPLAT, SPLAT
        send = plgpu.inline_mgpu(arg_types=(*places, *[layout] * len(sent)))(_send)
        send(inbox_ref, counts_ref, call, side, own, token, *sent)
        if meeting != "norm":  # read while parts of other GPUs are on the way
            values, scales = load(x_ref.at[token]), weight()
        wait = plgpu.inline_mgpu(arg_types=(PLAIN, SPLAT, SPLAT))(_wait)
        wait(counts_ref, call, token)
        if meeting == "norm":
            for gpu in range(gpus):
                out_ref.at[gpu, token][...] = load(inbox_ref.at[side, gpu, token]).astype(dtype)
            return
        for gpu in range(gpus):
            values += load(inbox_ref.at[side, gpu, token])
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
            "inbox_ref": inbox_ref,
            "counts_ref": counts_ref,
        },
        outputs={
            "sum_ref": jax.ShapeDtypeStruct(x.shape, jnp.float32),
            "out_ref": jax.ShapeDtypeStruct(all_of_them + x.shape, dtype),
        },
        # XLA would let all GPUs meet before the launch, as for semaphores that it has set to zero.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            skip_device_barrier=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,  # where PTX can name a peer's memory
        ),
    )
    normed = out["out_ref"].reshape(-1, features)
    return out["sum_ref"], normed, jax.freeze(inbox_ref), jax.freeze(counts_ref)


def _send(
    ctx: Any, inbox: Any, counts: Any, call: Any, side: Any, own: Any, token: Any, *sent: Any
) -> None:
    """Writes a token's part into the inbox on each GPU, and then the call's number there.

    Args:
        sent: one for all GPUs, or one for each.
    """
    call, side, own, token = (single(x) for x in (call, side, own, token))
    thread = Thread()
    _, gpus, tokens, features = ir.MemRefType(inbox.type).shape
    row = plus(times(plus(times(side, gpus), own), tokens), token)
    wide = ir.VectorType(sent[0].registers.flat[0].type).shape[0] * BYTES
    place = plus(times(row, features * BYTES), times(thread.index, wide))
    for gpu in range(gpus):
        there = ctx.to_remote(inbox, word(gpu))
        for number, vector in enumerate(sent[gpu % len(sent)].registers.flat):
            store(vector, there, place, number * THREADS * wide)
    utils.warpgroup_barrier()
    with _each(thread, gpus):
        count = pointer(
            ctx.to_remote(counts, thread.index), times(plus(times(own, tokens), token), 4)
        )
        asm("st.release.sys.global.u32 [$0], $1;", [], [count, call], "l,r,~{memory}")


def _wait(ctx: Any, counts: Any, call: Any, token: Any) -> None:
    """Waits for each GPU's part of a token. The warpgroup then sees all that came with it."""
    del ctx
    call, token, thread = single(call), single(token), Thread()
    gpus, tokens = ir.MemRefType(counts.type).shape
    with _each(thread, gpus):
        place = pointer(counts, times(plus(times(thread.index, tokens), token), 4))
        loop = scf.WhileOp([], [])
        with ir.InsertionPoint(loop.before.blocks.append()):
            acquire = "ld.acquire.sys.global.u32 $0, [$1];"
            (come,) = asm(acquire, [i32()], [place], "=r,l,~{memory}")
            # Behind the largest number comes the smallest, so numbers are compared by difference.
            missing = arith.cmpi(arith.CmpIPredicate.slt, plus(come, times(call, -1)), word(0))
            scf.condition(missing, [])
        with ir.InsertionPoint(loop.after.blocks.append()):
            scf.yield_([])
    utils.warpgroup_barrier()


def _each(thread: Thread, gpus: int) -> Any:
    """Where thread number g is at work for GPU g."""
    return utils.when(arith.cmpi(arith.CmpIPredicate.ult, thread.index, word(gpus)))
