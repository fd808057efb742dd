"""Which experts a token takes, and with what weights, in one launch: a warpgroup for each token.

XLA sorts all E scores of a token in several kernels. Here the best is taken K times; of equal ones
the first, as `lax.top_k` does. A token whose scores are NaN gets weights of NaN.

What surrounds it is in the launch too, as each step of it would be one of XLA's: the sum of the
logits' two halves, the experts that every token takes and their gate, and padding. Of one token
the list of work is made as well.

Limits: E up to 1024 and a multiple of 32. Reference and tests: `jaxattn.ops.moe.route`
(implementation="xla"), tests/kernels/moe/test_route.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.hopper.launch import launch
from jaxattn.kernels.hopper.machine import meet, require_hopper
from jaxattn.kernels.moe.best import best_of
from jaxattn.kernels.moe.few import Lister, work_of
from jaxattn.kernels.moe.work import Work

THREADS = 128
MOST_EXPERTS, LEAST = 1024, 32  # a copy is a multiple of 128 bytes
COPIED = 256  # scores of a TMA copy
ALIGNED = 4  # logits of 16 bytes, at multiples of which copies begin


class Listed(NamedTuple):
    """The list of work for a token, and the token in 8 rows, of which it is the first."""

    work: Work
    rows: jax.Array


def refuse(logits: jax.Array, experts: int, *, interpret: bool) -> None:
    """Raises `Refusal` with the reason where the kernel does not serve."""
    require_hopper("route", interpret=interpret)
    if experts % LEAST or not 0 < experts <= MOST_EXPERTS or logits.size == 0:
        raise Refusal(
            f"route: the kernel has a multiple of {LEAST} experts, at most {MOST_EXPERTS}, and "
            f"some tokens; got logits {tuple(logits.shape)}"
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
    detect_races: bool = False,
) -> tuple[jax.Array, jax.Array, Listed | None]:
    """(ids int32, weights float32) [T, K + always] of float32 logits; a `Router` has the options.

    Args:
        logits: [T, E or more], of which `experts` says E; with `halves` two of them side by side.
        always: experts E, E + 1 and so on that every token takes, with weight 1.
        gated: or with the sigmoid of the logit behind the last expert's.
        layer: the row of a stack of biases [L, E] is `a * layer + b`, `affine` being (a, b).
        valid: int32 [T], 0 for padding, whose ids are -1.
        x: [1, F], where T is 1: the list of work is made too, with this token in its rows.
    """
    tokens, columns = logits.shape[0], logits.shape[1] // (1 + halves)
    experts = columns if experts is None else experts
    refuse(logits, experts, interpret=interpret)
    if not halves:
        logits = jnp.pad(logits, ((0, 0), (0, -columns % ALIGNED)))
    width = -(-experts // THREADS) * THREADS
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=1)
    size = experts // groups
    stacked = bias is not None and bias.ndim == 2

    def full(value: Any) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(value, (width,), []), layout)

    lister = None
    if x is not None:
        lister = Lister(1, top_k + always, experts + always, x.shape[1], interpret=interpret)

    def body(
        logits_ref, bias_ref, layer_ref, valid_ref, x_ref, ids_ref, weights_ref,
        scores_smem, low_smem, bias_smem, choice_smem, ids_smem, loaded, rows=None, **of_list,
    ):  # fmt: skip
        token = lax.axis_index("token")
        if lister is not None:
            lister.copy(x_ref, rows)
        nothing, zero = full(jnp.float32(-jnp.inf)), full(jnp.float32(0))
        expert = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)

        def load(source: Any, before: int, target: Any, rest: jax.Array) -> None:
            """Copies come behind what is written over whole vectors."""
            target[...] = rest
            plgpu.commit_smem()
            for first in range(0, experts, COPIED):
                size = min(COPIED, experts - first)
                some, there = pl.ds(first, size), pl.ds(before + first, size)
                plgpu.copy_gmem_to_smem(source.at[there], target.at[some], loaded)

        load(logits_ref.at[token], 0, scores_smem, nothing)
        if halves:
            load(logits_ref.at[token], columns, low_smem, zero)
        if bias is not None:
            row = layer_ref[0] * affine[0] + affine[1] if stacked else 0
            load(bias_ref.at[row], 0, bias_smem, zero)
        plgpu.barrier_wait(loaded)
        inside = expert < full(jnp.int32(experts))
        scores = plgpu.load(scores_smem, layout=layout)
        if halves:
            scores += plgpu.load(low_smem, layout=layout)
        choice = scores = scores_of(scores, full, sigmoid=sigmoid)
        if bias is not None:
            choice = scores + plgpu.load(bias_smem, layout=layout)
        meet(interpret=interpret)
        scores_smem[...] = scores  # for the weights, which the bias is no part of
        meet(interpret=interpret)
        choice = jnp.where(inside, choice, nothing)

        if top_groups < groups:
            choice = of_best_groups(choice, expert, full, groups, top_groups, best_of_group, size)
        if interpret:
            ids = best_of_interpreted(choice, expert, full, top_k)
        else:
            choice_smem[...] = choice
            meet(interpret=False)
            best_of(choice_smem, ids_smem, top_k)
            meet(interpret=False)
            ids = [ids_smem[k] for k in range(top_k)]
        weights = weights_of([scores_smem[place] for place in ids], normalize, scale)
        opened = jnp.float32(1)
        if gated:
            logit = logits_ref[token, experts]
            if halves:
                logit += logits_ref[token, columns + experts]
            opened = 1 / (1 + jnp.exp(-logit))
        ids += [jnp.int32(experts + i) for i in range(always)]
        weights += [opened] * always
        some = True if valid_ref is None else valid_ref[token] != 0
        ids = [jnp.where(some, place, -1) for place in ids]
        for k, (place, weight) in enumerate(zip(ids, weights, strict=True)):
            ids_ref[token, k] = place
            weights_ref[token, k] = weight
        if lister is not None:
            lister.write([ids], **of_list)

    copies = -(-experts // COPIED) * (1 + halves + (bias is not None))
    scores = plgpu.SMEM((width,), jnp.float32)
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
            "scores_smem": scores,
            "low_smem": scores if halves else None,
            "bias_smem": None if bias is None else scores,
            "choice_smem": None if interpret else scores,
            "ids_smem": None if interpret else plgpu.SMEM((top_k,), jnp.int32),
            "loaded": plgpu.Barrier(num_arrivals=copies),
            **({} if lister is None else lister.scratch()),
        },
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        detect_races=detect_races,
    )
    listed = None if lister is None else Listed(work_of(out), out["rows"])
    return out["ids_ref"], out["weights_ref"], listed


def scores_of(logits: jax.Array, full: Any, *, sigmoid: bool) -> jax.Array:
    """The sigmoid of each logit, or the softmax of all."""
    if sigmoid:
        return 1.0 / (1.0 + jnp.exp(-logits))
    scores = jnp.exp(logits - full(jnp.max(logits)))
    return scores / full(jnp.sum(scores))


def weights_of(scores: list[jax.Array], normalize: bool, scale: float) -> list[jax.Array]:
    """The weights of the chosen experts, from their scores."""
    factor = jnp.float32(scale)
    if normalize:
        total = sum(scores[1:], scores[0]) + 1e-20
        scores = [score / total for score in scores]
    return [score * factor for score in scores]


def of_best_groups(
    choice: jax.Array,
    expert: jax.Array,
    full: Any,
    groups: int,
    top_groups: int,
    best_of_group: int,
    size: int,
) -> jax.Array:
    """-inf for experts of other groups than the best `top_groups`, of `size` experts each.

    Args:
        choice: of all experts.
        expert: their numbers.
        full: makes a vector of a scalar.
    """
    nothing, nowhere = full(jnp.float32(-jnp.inf)), full(jnp.int32(choice.shape[0]))

    def inside(group: int) -> jax.Array:
        low, high = (full(jnp.int32(x * size)) for x in (group, group + 1))
        return (expert >= low) & (expert < high)

    totals = []
    for group in range(groups):
        own = jnp.where(inside(group), choice, nothing)
        total = jnp.float32(0)
        for i in range(best_of_group):
            top = jnp.max(own)
            total += top
            if i < best_of_group - 1:  # the first of several; no place among NaN
                place = jnp.min(jnp.where(own == full(top), expert, nowhere))
                own = jnp.where(expert == full(place), nothing, own)
        totals.append(total)
    kept = nothing
    for group, total in enumerate(totals):
        before = sum(
            jnp.where((other > total) | ((other == total) & (i < group)), 1, 0)
            for i, other in enumerate(totals)
            if i != group
        )
        is_kept = full(jnp.where(before < top_groups, 1, 0)) > full(jnp.int32(0))
        kept = jnp.where(inside(group) & is_kept, choice, kept)
    return kept


def best_of_interpreted(
    choice: jax.Array, expert: jax.Array, full: Any, top_k: int
) -> list[jax.Array]:
    """`best_of` in the interpreter, which runs no code of its own: the places of the best."""
    nowhere = full(jnp.int32(choice.shape[0]))
    # A NaN is better than any number, and what was taken is no one's to take.
    choice = jnp.where(choice != choice, full(jnp.float32(jnp.inf)), choice)
    untaken, ids = expert, []
    for _ in range(top_k):
        some = jnp.where(untaken < nowhere, choice, full(jnp.float32(-jnp.inf)))
        place = jnp.min(jnp.where(some == full(jnp.max(some)), untaken, nowhere))
        untaken = jnp.where(expert == full(place), nowhere, untaken)
        ids.append(place)
    return ids
