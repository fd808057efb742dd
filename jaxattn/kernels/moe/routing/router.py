"""Top-k routing of tokens to experts in one launch, with a warpgroup for each token.

The launch also contains the steps around the gating (topk_gating.py), each of which would be an XLA
kernel. These are the sum of the logits' two halves, the experts that every token takes and their
gate, and padding. For one token it also makes the work list.

Limits: E up to 1024 and a multiple of 32. Reference and tests: `jaxattn.ops.moe.routing.route`
(implementation="xla"), tests/kernels/moe/test_router.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.moe.routing.small_batch_alignment import SmallBatchAlignment, alignment_of
from jaxattn.kernels.moe.routing.token_alignment import TokenAlignment
from jaxattn.kernels.moe.routing.topk_gating import TopkGating

MOST_EXPERTS, LEAST = 1024, 32  # a copy is a multiple of 128 bytes
COPIED = 256  # scores of a TMA copy
ALIGNED = 4  # logits of 16 bytes; copies begin at multiples of them


class RoutedToken(NamedTuple):
    """The work list for a token.

    Attributes:
        rows: The token, and the other rows of a tile of 8, if any.
        left: [1] or more: how many of the first tiles have no h yet.
    """

    work: TokenAlignment
    rows: jax.Array
    left: jax.Array


def refuse(logits: jax.Array, experts: int, *, interpret: bool) -> None:
    """Raises `Refusal`, with the reason, if the kernel does not serve the call."""
    require_hopper("route", interpret=interpret)
    if experts % LEAST or not 0 < experts <= MOST_EXPERTS or logits.size == 0:
        raise Refusal(
            f"route: the kernel needs a multiple of {LEAST} experts, at most {MOST_EXPERTS}, and "
            f"at least one token; got logits {tuple(logits.shape)}"
        )


def route_mosaic(
    logits: jax.Array,
    bias: jax.Array | None,
    *,
    top_k: int,
    sigmoid: bool,
    groups: int,
    top_groups: int,
    best_of_group: int,
    normalize: bool,
    scale: float,
    experts: int | None = None,
    halves: bool = False,
    always: int = 0,
    gated: bool = False,
    layer: jax.Array | None = None,
    affine: tuple[int, int] = (1, 0),
    valid: jax.Array | None = None,
    x: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, RoutedToken | None]:
    """Returns (ids int32, weights float32) [T, K + always] for float32 logits; a `Router` has the
    options.

    Args:
        logits: [T, E or more], with E in `experts`; with `halves` two of them side by side.
        always: The number of experts E, E + 1 and so on that every token takes, with weight 1.
        gated: Whether their weight is the sigmoid of the logit after the last expert's instead.
        layer: The row of a stack of biases [L, E] is `a * layer + b`, `affine` being (a, b).
        valid: int32 [T], 0 for padding, whose ids are -1.
        x: [1, F], if T is 1: the work list is then made too, with this token in its rows.
    """
    tokens, columns = logits.shape[0], logits.shape[1] // (1 + halves)
    experts = columns if experts is None else experts
    refuse(logits, experts, interpret=interpret)
    if not halves:
        logits = jnp.pad(logits, ((0, 0), (0, -columns % ALIGNED)))
    choice = TopkGating(
        experts=experts, top_k=top_k, sigmoid=sigmoid, groups=groups, top_groups=top_groups,
        best_of_group=best_of_group, normalize=normalize, scale=scale, interpret=interpret,
    )  # fmt: skip
    stacked = bias is not None and bias.ndim == 2
    full = choice.full
    lister = None
    if x is not None:
        lister = SmallBatchAlignment(
            1, top_k + always, experts + always, x.shape[1], interpret=interpret
        )

    def body(
        logits_ref, bias_ref, layer_ref, valid_ref, x_ref, ids_ref, weights_ref,
        high_smem, low_smem, bias_smem, scores_smem, choice_smem, ids_smem, loaded, rows=None,
        **of_list,
    ):  # fmt: skip
        token = lax.axis_index("token")
        # Loaded before anything waits: each of these reads takes as long as the copies.
        some = True if valid_ref is None else valid_ref[token] != 0
        gate = logits_ref[token, experts] if gated else None
        if gated and halves:
            gate += logits_ref[token, columns + experts]

        def load(source: Any, before: int, target: Any) -> None:
            """Copies numbers to `target`; if the copies do not fill it, first zeroes all of it."""
            if experts < choice.width:
                target[...] = full(jnp.float32(0))
                plgpu.commit_smem()
            for first in range(0, experts, COPIED):
                size = min(COPIED, experts - first)
                here, there = pl.ds(first, size), pl.ds(before + first, size)
                plgpu.copy_gmem_to_smem(source.at[there], target.at[here], loaded)

        load(logits_ref.at[token], 0, high_smem)
        if halves:
            load(logits_ref.at[token], columns, low_smem)
        if bias_ref is not None:
            row = layer_ref[0] * affine[0] + affine[1] if stacked else 0
            load(bias_ref.at[row], 0, bias_smem)
        if lister is not None:
            lister.copy(x_ref, rows)
        plgpu.barrier_wait(loaded)
        every = plgpu.load(high_smem, layout=choice.layout)
        if halves:
            every += plgpu.load(low_smem, layout=choice.layout)
        of_bias = None if bias_ref is None else plgpu.load(bias_smem, layout=choice.layout)
        ids, weights = choice.take(every, of_bias, scores_smem, choice_smem, ids_smem)
        opened = jnp.float32(1) if gate is None else 1 / (1 + jnp.exp(-gate))
        ids += [jnp.int32(experts + i) for i in range(always)]
        weights += [opened] * always
        ids = [jnp.where(some, place, -1) for place in ids]
        for k, (place, weight) in enumerate(zip(ids, weights, strict=True)):
            ids_ref[token, k] = place
            weights_ref[token, k] = weight
        if lister is not None:
            lister.write([ids], **of_list)

    copies = -(-experts // COPIED) * (1 + halves + (bias is not None))
    scores = plgpu.SMEM((choice.width,), jnp.float32)
    out = launch(
        body,
        name="moe_route",
        grid={"token": tokens},
        inputs={
            "logits_ref": logits,
            "bias_ref": bias if bias is None or stacked else bias[None],
            "layer_ref": jnp.asarray(layer, jnp.int32).reshape(1) if stacked else None,
            "valid_ref": valid,
            "x_ref": x,
        },
        outputs={
            "ids_ref": jax.ShapeDtypeStruct((tokens, top_k + always), jnp.int32),
            "weights_ref": jax.ShapeDtypeStruct((tokens, top_k + always), jnp.float32),
            **({} if lister is None or x is None else lister.outputs(x.dtype)),
        },
        scratch={
            "high_smem": scores,
            "low_smem": scores if halves else None,
            "bias_smem": None if bias is None else scores,
            **choice.scratch(),
            "loaded": plgpu.Barrier(num_arrivals=copies),
            **({} if lister is None else lister.scratch()),
        },
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    listed = None if lister is None else RoutedToken(alignment_of(out), out["rows"], out["total"])
    return out["ids_ref"], out["weights_ref"], listed
