"""`mixture_of_experts` with its gradient on a Hopper GPU: a forward pass that saves residuals, and
the backward pass.

    forward    gate_up keeps gate x and up x of each (token, expert) pair beside h; down; the sum
    backward   dh = dout down                     the forward's kernel with transposed weights
               d gate, d up, d weights            activation_gradient.py, or XLA
               dx = [d gate, d up] gate_up        the forward's kernel with transposed weights
               d down, d gate_up                  weight_gradient.py

The intermediate arrays have one row per pair, sorted by expert; 64 rows are a step of the weights'
gradients. Rows of padding are 0 in everything that the backward pass adds up. Each sum has a fixed
order: gradients have the same bits each time.

A token's weight multiplies dh, and not the product with `down`, so that its gradient is dh h of a
row: the outputs of the experts are not saved.

Limits: those of launch.py, without FP8 weights. Reference: `jaxattn.ops.moe.experts`
(implementation="xla"); tests: tests/kernels/moe/test_gradient.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxattn.core.dispatch import Refusal, without_gradient
from jaxattn.core.numerics.swiglu import ClampedSwiGLU, swiglu
from jaxattn.kernels.moe.backward.activation_gradient import swiglu_gradient, swiglu_serves
from jaxattn.kernels.moe.backward.row_gather import tokens_in_rows
from jaxattn.kernels.moe.backward.weight_gradient import DEPTH, weight_gradient
from jaxattn.kernels.moe.combine import combine
from jaxattn.kernels.moe.grouped_gemm import grouped_product
from jaxattn.kernels.moe.launch import FP8, OP, output_columns, refuse
from jaxattn.kernels.moe.panel_matrix import PanelMatrix, panel
from jaxattn.kernels.moe.routing.token_alignment import TokenAlignment, align_tokens
from jaxattn.kernels.moe.tile_config import (
    BLOCK,
    ROWS,
    GemmTileConfig,
    MoeTileConfig,
    choose,
    padded_rows,
)

# The name by which `jax.checkpoint` can save it (`jax.checkpoint_policies.save_only_these_names`).
SAVED_NAME = "moe_gate_up"


class ExpertRows(NamedTuple):
    """The rows of the pairs (token, expert), sorted by expert.

    Attributes:
        work: The list of tiles; an expert's rows begin at a multiple of 64.
        pairs: int32 [R], each row's pair t * K + k, -1 for padding.
        starts, steps: int32 [E], each expert's first row, and its number of steps of 64 rows.
    """

    work: TokenAlignment
    pairs: jax.Array
    starts: jax.Array
    steps: jax.Array


class ExpertOperands(NamedTuple):
    """The differentiable operands of the op; or their gradients, in the same dtypes."""

    x: jax.Array
    weights: jax.Array
    gate_up: jax.Array  # a stack, as the others
    down: jax.Array
    gate_up_bias: jax.Array | None
    down_bias: jax.Array | None


class ExpertResiduals(NamedTuple):
    """The residuals of the forward pass: for each row its token [R, F], and gate x and up x,
    [R, 2 I]."""

    operands: ExpertOperands
    layer: jax.Array
    rows: ExpertRows
    tokens: jax.Array
    saved: jax.Array


def forward_with_residuals(
    operands: ExpertOperands,
    ids: jax.Array,
    *,
    activation: ClampedSwiGLU | None = None,
    layer: jax.Array | int,
    affine: tuple[int, int] = (1, 0),
    interpret: bool = False,
) -> tuple[jax.Array, ExpertResiduals]:
    """Returns `mixture_of_experts_mosaic` of stacks, with the same bits, and the residuals of its
    gradient."""
    refuse(operands.x, operands.gate_up, interpret=interpret)
    if operands.gate_up.dtype == FP8:
        raise Refusal(f"{OP}: the gradient kernels do not support FP8 weights")
    operands = without_gradient(OP, operands)
    x, weights, gate_up, down, gate_up_bias, down_bias = operands
    features, width, dtype = x.shape[1], down.shape[-1], gate_up.dtype
    config = config_of(operands)
    rows = rows_of(ids, gate_up.shape[1], config.columns)
    number = jnp.asarray(layer, jnp.int32).reshape(1)
    common: dict[str, Any] = {
        "layer": number, "affine": affine, "columns": config.columns,
        "interpret": interpret,
    }  # fmt: skip
    gathered = tokens_in_rows(x.astype(dtype), rows.pairs, ids.shape[1], interpret=interpret)
    count, wide = len(rows.pairs), output_columns(features)
    h_at, y_at = PanelMatrix(0, count, width), PanelMatrix(0, count, panel(wide))
    # New arrays, and not refs: in a scan, JAX 0.11.2 treats what is written to a ref as known
    # before the loop.
    shape = jax.ShapeDtypeStruct
    both = grouped_product(
        gathered, gate_up, None, gate_up_bias, rows.work, shape((count, width), dtype),
        activation=activation, source=PanelMatrix(0, count, features), results=h_at,
        saved=shape((count, 2 * width), dtype), product=config.gate_up, gated=True,
        name="moe_gate_up", **common,
    )  # fmt: skip
    outputs = dtype if config.rounded else jnp.float32
    y = grouped_product(
        both["target"], down, None, down_bias, rows.work,
        shape((wide // panel(wide) * count, panel(wide)), outputs), source=h_at, results=y_at,
        product=config.down, gated=False, name="moe_down", **common,
    )["target"]  # fmt: skip
    out = combine(
        y, rows.work.positions, weights, results=y_at, features=features, columns=config.combine,
        interpret=interpret,
    )  # fmt: skip
    rows = jax.tree.map(lambda x: checkpoint_name(x, SAVED_NAME), rows)
    saved = checkpoint_name(both["saved"], SAVED_NAME)
    return out, ExpertResiduals(operands, number, rows, gathered, saved)


def config_of(operands: ExpertOperands) -> MoeTileConfig:
    return choose(
        tokens=operands.x.shape[0],
        top_k=operands.weights.shape[1],
        experts=operands.gate_up.shape[1],
        hidden=operands.x.shape[1],
        expert_size=operands.down.shape[-1],
    )


def gradients(
    residuals: ExpertResiduals,
    cotangent: jax.Array,
    *,
    activation: ClampedSwiGLU | None = None,
    affine: tuple[int, int] = (1, 0),
    interpret: bool = False,
) -> ExpertOperands:
    """Returns the gradients of a sum whose gradient with respect to the output [T, F] is
    `cotangent`."""
    residuals, cotangent = without_gradient(OP, (residuals, cotangent))
    return ExpertBackward(residuals, affine, interpret).gradients(cotangent, activation or swiglu)


class ExpertBackward:
    """The backward pass for the residuals of a forward pass."""

    def __init__(self, residuals: ExpertResiduals, affine: tuple[int, int], interpret: bool):
        self.residuals, self.affine, self.interpret = residuals, affine, interpret
        self.operands, self.rows = residuals.operands, residuals.rows
        self.dtype, self.count = residuals.saved.dtype, len(residuals.rows.pairs)
        self.is_token = residuals.rows.pairs >= 0

    def gradients(self, cotangent: jax.Array, activation: Any) -> ExpertOperands:
        x, weights, gate_up, down, *biases = self.operands
        of_out = self.gathered(cotangent)
        result_panels = PanelMatrix(0, self.count, down.shape[-1])
        inner = self.product(of_out, down, result_panels, "moe_down_gradient")
        shares = jnp.where(self.is_token, weights.reshape(-1)[self.rows.pairs], 0).astype(
            jnp.float32
        )
        operands = inner, self.residuals.saved, shares, self.is_token
        if activation is swiglu and swiglu_serves(*inner.shape):
            of_gates, hidden, of_shares = swiglu_gradient(*operands, interpret=self.interpret)
        else:
            of_gates, hidden, of_shares = through_activation(*operands, activation)
        of_biases: list[jax.Array | None] = [None, None]
        if biases[1] is not None:
            of_biases = [self.sums(of_gates), self.sums(of_out, shares)]
            of_shares += self.met_bias(of_out, biases[1])
        return ExpertOperands(
            self.summed_up(of_gates),
            self.of_weights(of_shares).astype(weights.dtype),
            self.stacked(self.weight_gradient(of_gates, self.residuals.tokens, "gate_up"), gate_up),
            self.stacked(self.weight_gradient(of_out, hidden, "down"), down),
            *(
                None if one is None or stack is None else self.stacked(one, stack)
                for one, stack in zip(of_biases, biases, strict=True)
            ),
        )

    def gathered(self, x: jax.Array) -> jax.Array:
        x, top_k = x.astype(self.dtype), self.operands.weights.shape[1]
        return tokens_in_rows(x, self.rows.pairs, top_k, interpret=self.interpret)

    def product(
        self, operand: jax.Array, stack: jax.Array, result_panels: PanelMatrix, name: str
    ) -> jax.Array:
        """Multiplies rows by the weights [out, in] themselves; the forward multiplies by their
        transposes."""
        depth, height = stack.shape[-2:]
        panels = -(-height // result_panels.width)  # the last one may be partial
        return grouped_product(
            operand, stack, None, None, self.rows.work,
            jax.ShapeDtypeStruct((panels * self.count, result_panels.width), self.dtype),
            source=PanelMatrix(0, self.count, depth), results=result_panels, gated=False,
            transposed=True, product=product_config(height, depth),
            columns=config_of(self.operands).columns,
            layer=self.residuals.layer, affine=self.affine, name=name, interpret=self.interpret,
        )["target"]  # fmt: skip

    def weight_gradient(self, left: jax.Array, right: jax.Array, name: str) -> jax.Array:
        return weight_gradient(
            left, right, self.rows.starts, self.rows.steps, name=f"moe_{name}_weights",
            interpret=self.interpret,
        )  # fmt: skip

    def summed_up(self, of_gates: jax.Array) -> jax.Array:
        """Returns the gradient of x [T, F], in its dtype. Experts are added in the order of ids."""
        x, weights = self.operands.x, self.operands.weights
        features = x.shape[1]
        dtype = x.dtype if x.dtype.itemsize <= 4 else jnp.float32  # kernels have no float64
        result_panels = PanelMatrix(0, self.count, panel(output_columns(features)))
        row_gradients = self.product(
            of_gates, self.operands.gate_up, result_panels, "moe_gate_up_gradient"
        )
        return combine(
            row_gradients, self.rows.work.positions, jnp.ones_like(weights), results=result_panels,
            features=features, columns=512, dtype=dtype, interpret=self.interpret,
        ).astype(x.dtype)  # fmt: skip

    def of_weights(self, of_shares: jax.Array) -> jax.Array:
        """Returns [T, K] from the rows' gradients; 0 for an id that is not an expert's."""
        places = self.rows.work.positions.reshape(self.operands.weights.shape)
        return jnp.where(places >= 0, of_shares[jnp.maximum(places, 0)], 0)

    @property
    def members(self) -> jax.Array:
        """[R, E], whether a row belongs to an expert."""
        places, ends = jnp.arange(self.count)[:, None], self.rows.steps * DEPTH
        return (places >= self.rows.starts) & (places < self.rows.starts + ends)

    def sums(self, of_rows: jax.Array, shares: jax.Array | None = None) -> jax.Array:
        """Returns [E, N], the sum of each expert's rows, by a product, whose order is fixed."""
        factors = self.members if shares is None else self.members * shares[:, None]
        return jnp.einsum(
            "re,rj->ej", factors.astype(jnp.float32), of_rows.astype(jnp.float32),
            precision="highest",
        )  # fmt: skip

    def met_bias(self, of_out: jax.Array, down_bias: jax.Array) -> jax.Array:
        """Returns [R], the contribution of down's bias to the gradients of the tokens' weights."""
        bias = down_bias[self.number].astype(jnp.float32)[jnp.argmax(self.members, axis=1)]
        return jnp.where(self.is_token, (of_out.astype(jnp.float32) * bias).sum(1), 0)

    @property
    def number(self) -> jax.Array:
        return self.affine[0] * self.residuals.layer[0] + self.affine[1]

    def stacked(self, gradient: jax.Array, stack: jax.Array) -> jax.Array:
        """Returns the gradient of a stack of layers, in which the other layers' is 0."""
        gradient = gradient.astype(stack.dtype)
        if len(stack) == 1:
            return gradient[None]
        return jnp.zeros_like(stack).at[self.number].set(gradient)


def rows_of(ids: jax.Array, experts: int, columns: int) -> ExpertRows:
    """Returns the rows of `ids` [T, K], and the list of tiles of `columns` rows."""
    work = align_tokens(ids, experts, columns, DEPTH)
    tokens, top_k = ids.shape
    count = padded_rows(tokens, top_k, experts, columns, DEPTH)
    places = jnp.where(work.positions < 0, count, work.positions)
    pairs = jnp.full(count, -1, jnp.int32)
    pairs = pairs.at[places].set(jnp.arange(ids.size, dtype=jnp.int32), mode="drop")
    valid = (ids >= 0) & (ids < experts)
    counts = jnp.bincount(jnp.where(valid, ids, experts).reshape(-1), length=experts + 1)
    steps = -(-counts[:experts].astype(jnp.int32) // DEPTH)
    starts = (jnp.cumsum(steps) - steps) * DEPTH
    return ExpertRows(work._replace(tokens=None), pairs, starts, steps)


def product_config(rows: int, depth: int) -> GemmTileConfig:
    """Returns the largest tile of weights that divides these sizes."""
    for consumers, parts in ((2, 2), (2, 1)):
        if rows % (consumers * parts * ROWS) == 0:
            return GemmTileConfig(consumers=consumers, parts=parts, depth=ROWS)
    return GemmTileConfig(consumers=1, parts=1, depth=BLOCK if depth % BLOCK == 0 else ROWS)


def through_activation(
    inner: jax.Array,
    saved: jax.Array,
    shares: jax.Array,
    is_token: jax.Array,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of gate and up [R, 2 I], h times the token's weight [R, I], both
    rounded, and the weights' gradients [R]. Args: `inner` is the gradient of h if all weights were
    1."""
    gate, up = jnp.split(saved.astype(jnp.float32), 2, axis=1)
    inner = inner.astype(jnp.float32)
    h, pullback = jax.vjp(activation, gate, up)
    of_shares = jnp.where(is_token, (inner * h).sum(1), 0)
    of_gates = jnp.concatenate(pullback(inner * shares[:, None]), axis=1)
    token_mask = is_token[:, None]
    return (
        jnp.where(token_mask, of_gates, 0).astype(saved.dtype),
        jnp.where(token_mask, h * shares[:, None], 0).astype(saved.dtype),
        of_shares,
    )
