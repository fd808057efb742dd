"""`mixture_of_experts` with its gradient on a Hopper GPU: a forward that keeps what the backward
needs, and the backward.

    forward    gate_up keeps gate x and up x of each (token, expert) pair beside h; down; the sum
    backward   dh = dout down                     the forward's kernel with transposed weights
               d gate, d up, d weights            XLA, element by element
               dx = [d gate, d up] gate_up        the forward's kernel with transposed weights
               d down, d gate_up                  weight_gradient.py

Between the products lie the rows of the pairs, sorted by expert, 64 of which are a step of the
weights' gradients. Rows of padding are 0 in all that the backward adds up. Each sum has a fixed
order: gradients have the same bits each time.

A token's weight meets dh, and not the product with `down`, so that its gradient is dh h of a row:
the outputs of the experts are not kept.

Limits: of launch.py, without FP8 weights. Reference: `jaxattn.ops.moe.experts`
(implementation="xla"); tests: tests/kernels/moe/test_gradient.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxattn.core.dispatch import Refusal, without_gradient
from jaxattn.core.numerics.swiglu import ClampedSwiGLU, swiglu
from jaxattn.kernels.moe.backward.weight_gradient import DEPTH, weight_gradient
from jaxattn.kernels.moe.combine import combine
from jaxattn.kernels.moe.grouped_gemm import PanelMatrix, grouped_product
from jaxattn.kernels.moe.launch import FP8, OP, output_columns, refuse
from jaxattn.kernels.moe.routing.token_alignment import TokenAlignment, align_tokens
from jaxattn.kernels.moe.tile_config import (
    BLOCK,
    ROWS,
    GemmTileConfig,
    MoeTileConfig,
    choose,
    padded_rows,
    panel,
)

# What `jax.checkpoint` can keep by name (`jax.checkpoint_policies.save_only_these_names`).
SAVED_NAME = "moe_gate_up"


class ExpertRows(NamedTuple):
    """The rows of the pairs (token, expert), sorted by expert.

    Attributes:
        work: the list of tiles; an expert's rows begin at a multiple of 64.
        pairs: int32 [R], each row's pair t * K + k, -1 of padding.
        starts, steps: int32 [E], each expert's first row, and how many times 64 rows it has.
    """

    work: TokenAlignment
    pairs: jax.Array
    starts: jax.Array
    steps: jax.Array


class ExpertResiduals(NamedTuple):
    """What the forward keeps: `saved` is [R, 2 I], gate x and up x of each row."""

    x: jax.Array
    weights: jax.Array
    gate_up: jax.Array
    down: jax.Array
    gate_up_bias: jax.Array | None
    down_bias: jax.Array | None
    layer: jax.Array
    rows: ExpertRows
    saved: jax.Array


class ExpertGradients(NamedTuple):
    """Of the operands of these names, in their dtypes; weights' and biases' are whole stacks."""

    x: jax.Array
    weights: jax.Array
    gate_up: jax.Array
    down: jax.Array
    gate_up_bias: jax.Array | None
    down_bias: jax.Array | None


def forward_with_residuals(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    *,
    activation: ClampedSwiGLU | None = None,
    layer: jax.Array,
    affine: tuple[int, int] = (1, 0),
    config: MoeTileConfig | None = None,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[jax.Array, ExpertResiduals]:
    """`mixture_of_experts_mosaic` of stacks, to the bit, and what its gradient needs."""
    refuse(x, gate_up, interpret=interpret)
    if gate_up.dtype == FP8:
        raise Refusal(f"{OP}: the kernels have no gradient of FP8 weights")
    kept = ExpertResiduals(
        *without_gradient(OP, (x, weights, gate_up, down, gate_up_bias, down_bias)),
        layer=jnp.asarray(layer, jnp.int32).reshape(1), rows=None, saved=None,
    )  # fmt: skip
    (tokens, features), top_k, experts = x.shape, ids.shape[1], gate_up.shape[1]
    width, dtype = down.shape[-1], gate_up.dtype
    config = config or choose(
        tokens=tokens, top_k=top_k, experts=experts, hidden=features, expert_size=width
    )
    rows = rows_of(ids, experts, config.columns)
    modes = {"interpret": interpret, "detect_races": detect_races}
    common: dict[str, Any] = {
        "layer": kept.layer, "affine": affine, "columns": config.columns, **modes,
    }  # fmt: skip
    gathered = kept.x.astype(dtype)[jnp.maximum(rows.pairs, 0) // top_k]
    count, wide = len(rows.pairs), output_columns(features)
    h_at, y_at = PanelMatrix(0, count, width), PanelMatrix(0, count, panel(wide))
    # New arrays, and not references: in a scan, JAX 0.11.2 takes what is written to a reference
    # for known before the loop.
    shape = jax.ShapeDtypeStruct
    both = grouped_product(
        gathered, kept.gate_up, None, kept.gate_up_bias, rows.work, shape((count, width), dtype),
        activation=activation, source=PanelMatrix(0, count, features), results=h_at,
        saved=shape((count, 2 * width), dtype),
        product=config.gate_up, gated=True, name="moe_gate_up", **common,
    )  # fmt: skip
    y = grouped_product(
        both["target"], kept.down, None, kept.down_bias, rows.work,
        shape((wide // panel(wide) * count, panel(wide)), jnp.float32), source=h_at,
        results=y_at, product=config.down, gated=False, name="moe_down", **common,
    )["target"]  # fmt: skip
    out = combine(
        y, rows.work.positions, kept.weights, results=y_at, features=wide,
        columns=config.combine, **modes,
    )[:, :features]  # fmt: skip
    rows = jax.tree.map(lambda x: checkpoint_name(x, SAVED_NAME), rows)
    saved = checkpoint_name(both["saved"], SAVED_NAME)
    return out, kept._replace(x=x, rows=rows, saved=saved)


def gradients(
    kept: ExpertResiduals,
    cotangent: jax.Array,
    *,
    activation: ClampedSwiGLU | None = None,
    affine: tuple[int, int] = (1, 0),
    interpret: bool = False,
    detect_races: bool = False,
) -> ExpertGradients:
    """Of a sum whose gradient with respect to the output [T, F] is `cotangent`."""
    kept, cotangent = without_gradient(OP, (kept, cotangent))
    (tokens, features), top_k = kept.x.shape, kept.weights.shape[1]
    experts, width, dtype = kept.gate_up.shape[1], kept.down.shape[-1], kept.gate_up.dtype
    rows, count = kept.rows, len(kept.rows.pairs)
    modes: dict[str, bool] = {"interpret": interpret, "detect_races": detect_races}
    columns = choose(
        tokens=tokens, top_k=top_k, experts=experts, hidden=features, expert_size=width
    ).columns
    common: dict[str, Any] = {
        "layer": kept.layer, "affine": affine, "columns": columns, "gated": False,
        "transposed": True, **modes,
    }  # fmt: skip
    taken = rows.pairs >= 0
    token = jnp.maximum(rows.pairs, 0) // top_k

    def gathered(x: jax.Array) -> jax.Array:
        # A select: a row of padding may meet a token that is NaN.
        return jnp.where(taken[:, None], x.astype(dtype)[token], 0)

    def product(operand: jax.Array, stack: jax.Array, at: PanelMatrix, name: str) -> jax.Array:
        height, depth = stack.shape[-1], stack.shape[-2]
        shape = (height // at.width * count if height % at.width == 0 else count, at.width)
        return grouped_product(
            operand, stack, None, None, rows.work, jax.ShapeDtypeStruct(shape, dtype),
            source=PanelMatrix(0, count, depth), results=at, product=product_config(height, depth),
            name=name, **common,
        )["target"]  # fmt: skip

    of_out = gathered(cotangent)
    inner = product(of_out, kept.down, PanelMatrix(0, count, width), "moe_down_gradient")
    shares = jnp.where(taken, kept.weights.reshape(-1)[rows.pairs], 0).astype(jnp.float32)
    of_gates, hidden, of_shares = _through_activation(
        inner, kept.saved, shares, taken, activation or swiglu
    )
    wide = panel(output_columns(features))
    at = PanelMatrix(0, count, wide)
    spread = product(of_gates, kept.gate_up, at, "moe_gate_up_gradient")
    of_x = combine(
        spread, rows.work.positions, jnp.ones_like(kept.weights), results=at,
        features=output_columns(features), columns=512, **modes,
    )[:, :features]  # fmt: skip

    ranges = (rows.starts, rows.steps)
    of_down = weight_gradient(of_out, hidden, *ranges, name="moe_down_weights", **modes)
    of_gate_up = weight_gradient(
        of_gates, gathered(kept.x), *ranges, name="moe_gate_up_weights", **modes
    )
    of_biases: tuple[jax.Array | None, jax.Array | None] = (None, None)
    if kept.gate_up_bias is not None and kept.down_bias is not None:
        places = jnp.arange(count)[:, None]
        member = (places >= rows.starts) & (places < rows.starts + rows.steps * DEPTH)
        sums = lambda rows, factor=1: jnp.einsum(  # noqa: E731
            "re,rj->ej", member * factor, rows.astype(jnp.float32), precision="highest"
        )
        of_biases = sums(of_gates), sums(of_out, shares[:, None])
        expert = jnp.argmax(member, axis=1)
        bias = kept.down_bias[affine[0] * kept.layer[0] + affine[1]].astype(jnp.float32)
        of_shares += jnp.where(taken, (of_out.astype(jnp.float32) * bias[expert]).sum(1), 0)
    places = rows.work.positions.reshape(tokens, top_k)
    of_weights = jnp.where(places >= 0, of_shares[jnp.maximum(places, 0)], 0)

    def stacked(gradient: jax.Array | None, stack: jax.Array | None) -> jax.Array | None:
        if gradient is None or stack is None:
            return None
        gradient = gradient.astype(stack.dtype)
        if len(stack) == 1:
            return gradient[None]
        number = affine[0] * kept.layer[0] + affine[1]
        return jnp.zeros_like(stack).at[number].set(gradient)

    return ExpertGradients(
        of_x.astype(kept.x.dtype),
        of_weights.astype(kept.weights.dtype),
        stacked(of_gate_up, kept.gate_up),
        stacked(of_down, kept.down),
        stacked(of_biases[0], kept.gate_up_bias),
        stacked(of_biases[1], kept.down_bias),
    )


def rows_of(ids: jax.Array, experts: int, columns: int) -> ExpertRows:
    """The rows of `ids` [T, K], and the list of tiles of `columns` rows."""
    work = align_tokens(ids, experts, columns, DEPTH)
    count = padded_rows(*ids.shape, experts, columns, DEPTH)
    places = jnp.where(work.positions < 0, count, work.positions)
    pairs = jnp.full(count, -1, jnp.int32)
    pairs = pairs.at[places].set(jnp.arange(ids.size, dtype=jnp.int32), mode="drop")
    valid = (ids >= 0) & (ids < experts)
    counts = jnp.bincount(jnp.where(valid, ids, experts).reshape(-1), length=experts + 1)
    steps = -(-counts[:experts].astype(jnp.int32) // DEPTH)
    starts = (jnp.cumsum(steps) - steps) * DEPTH
    return ExpertRows(work._replace(tokens=None), pairs, starts, steps)


def product_config(rows: int, depth: int) -> GemmTileConfig:
    """The largest tile of weights that divides them."""
    for consumers, parts in ((2, 2), (2, 1)):
        if rows % (consumers * parts * ROWS) == 0:
            return GemmTileConfig(consumers=consumers, parts=parts, depth=ROWS)
    return GemmTileConfig(consumers=1, parts=1, depth=BLOCK if depth % BLOCK == 0 else ROWS)


def _through_activation(
    inner: jax.Array,
    saved: jax.Array,
    shares: jax.Array,
    taken: jax.Array,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of gate and up [R, 2 I], h times the token's weight [R, I], both rounded, and
    the weights' gradients [R]. Args: `inner` is the gradient of h where all weights were 1."""
    gate, up = jnp.split(saved.astype(jnp.float32), 2, axis=1)
    inner = inner.astype(jnp.float32)
    h, pullback = jax.vjp(activation, gate, up)
    of_shares = jnp.where(taken, (inner * h).sum(1), 0)
    of_gates = jnp.concatenate(pullback(inner * shares[:, None]), axis=1)
    some = taken[:, None]
    return (
        jnp.where(some, of_gates, 0).astype(saved.dtype),
        jnp.where(some, h * shares[:, None], 0).astype(saved.dtype),
        of_shares,
    )
