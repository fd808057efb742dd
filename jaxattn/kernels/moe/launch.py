"""`mixture_of_experts` (ops/moe/experts.py) on a Hopper GPU: alignment, two products and the sum.

    small_batch_alignment.py, medium_batch_alignment.py, large_batch_alignment.py,
    token_alignment.py
                       the work list: one launch for up to some hundred pairs, three for many;
                       else XLA
    grouped_gemm.py    gate and up, then down, each expert's tokens times its weights
    combine.py         the sum of each token's experts

Limits: F and I multiples of 64, with FP8 weights of 128; bfloat16, float16, or weights in
float8_e4m3fn with scales of 128 x 128, or 4-bit weights in tiles. FP8 weights have neither biases
nor another activation.
Reference: `jaxattn.ops.moe.experts.mixture_of_experts` (implementation="xla"); tests:
tests/kernels/moe/test_kernel.py.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.arena import Arena, ArenaSpec
from jaxattn.core.dispatch import Refusal, without_gradient
from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.core.numerics.swiglu import ClampedSwiGLU
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.hopper.four_bit_dequantization import serves
from jaxattn.kernels.moe.combine import ExpertOutputs
from jaxattn.kernels.moe.four_bit_tile_config import choose_four_bit
from jaxattn.kernels.moe.grouped_gemm import grouped_product
from jaxattn.kernels.moe.panel_matrix import PanelMatrix, panel
from jaxattn.kernels.moe.routing.large_batch_alignment import permute_tokens, supports_permutation
from jaxattn.kernels.moe.routing.medium_batch_alignment import align_and_sort_tokens, supports_sort
from jaxattn.kernels.moe.routing.router import RoutedToken
from jaxattn.kernels.moe.routing.small_batch_alignment import (
    align_small_batch,
    copies,
    supports_pairs,
)
from jaxattn.kernels.moe.routing.token_alignment import align_tokens
from jaxattn.kernels.moe.tile_config import BLOCK, GROUP, ROWS, MoeTileConfig, choose, padded_rows

OP = "mixture_of_experts"
HALVES = ("bfloat16", "float16")
FP8 = jnp.float8_e4m3fn


def scratch(
    *,
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    expert_size: int,
    dtype: Any = jnp.bfloat16,
    fp8: bool = False,
    form: FourBitFormat | None = None,
    config: MoeTileConfig | None = None,
) -> ArenaSpec:
    """Returns the scratch of `mixture_of_experts` in the arena: the values between the experts'
    products, and the experts' outputs.

    Args:
        tokens: T, padding included.
        top_k: K, experts per token.
        experts: E.
        hidden: F.
        expert_size: I, columns of each expert.
        dtype: The dtype of the products' operands: the weights', or x's if the weights are
            quantized.
        fp8: Whether the weights are FP8.
        form: The format of 4-bit weights.
        config: The tile configuration of the kernels; None is the choice of `mixture_of_experts`.

    Returns:
        Region `h` in `dtype`, the values between the experts' products, and region `y` in float32,
        their outputs. Both have T * K rows and padding, so that each expert begins at a tile.
    """
    sizes: dict[str, Any] = {
        "tokens": tokens, "top_k": top_k, "experts": experts, "hidden": hidden,
        "expert_size": expert_size,
    }  # fmt: skip
    config = config or _choose_config(form, fp8, sizes)
    rows = padded_rows(tokens, top_k, experts, config.columns)
    shape = lambda width: (width // panel(width), rows, panel(width))  # noqa: E731
    return ArenaSpec.of(
        OP, h=(shape(expert_size), dtype), y=(shape(output_columns(hidden)), jnp.float32)
    )


def _choose_config(form: FourBitFormat | None, fp8: bool, sizes: dict[str, Any]) -> MoeTileConfig:
    if form is None:
        return choose(**sizes, quantized=fp8)
    if not form.fits(sizes["expert_size"], sizes["hidden"]):  # the reference's, of any size
        return choose(**sizes)
    return choose_four_bit(form, **sizes)


def output_columns(features: int) -> int:
    """Returns the columns of the outputs y: a panel has at least 128."""
    return -(-features // BLOCK) * BLOCK


def refuse(
    x: jax.Array, gate_up: jax.Array, form: FourBitFormat | None = None, *, interpret: bool
) -> None:
    """Raises `Refusal`, with the reason, if the kernels do not serve the call."""
    require_hopper(OP, interpret=interpret)
    if x.shape[0] == 0:
        raise Refusal(f"{OP}: the kernels need at least one token, got x {x.shape}")
    if form is not None:
        if not serves(form, x.dtype):
            raise Refusal(
                f"{OP}: the kernels multiply 4-bit weights by bfloat16, or by float16 if the "
                f"scales are not bfloat16; got x {x.dtype.name} and {form}"
            )
        return
    features, width = gate_up.shape[-1], gate_up.shape[-2] // 2
    quantized = gate_up.dtype == FP8
    least = BLOCK if quantized else ROWS
    if features % least or width % least:
        raise Refusal(
            f"{OP}: the kernels need F and I multiples of {least}, got F = {features}, I = {width}"
        )
    operands = x.dtype.name if quantized else gate_up.dtype.name
    if operands not in HALVES:
        raise Refusal(
            f"{OP}: the kernels need bfloat16 or float16, got x {x.dtype.name}, gate_up "
            f"{gate_up.dtype.name}"
        )


def mixture_of_experts_mosaic(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    gate_up_scale: jax.Array | None = None,
    down_scale: jax.Array | None = None,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    activation: ClampedSwiGLU | None = None,
    form: FourBitFormat | None = None,
    layer: jax.Array | int,
    affine: tuple[int, int] = (1, 0),
    arena: Arena | None = None,
    listed: RoutedToken | None = None,
    apart: bool = False,
    config: MoeTileConfig | None = None,
    interpret: bool = False,
) -> Any:
    """`mixture_of_experts` of stacks [L, E, ...], with the same arguments.

    `affine` (a, b): the layer is `a * layer + b`. With `apart` the result is an `ExpertOutputs`
    instead of the sum.
    """
    refuse(x, gate_up, form, interpret=interpret)
    if gate_up_scale is not None and (gate_up_bias is not None or activation is not None):
        raise Refusal(
            f"{OP}: the kernels support neither biases nor other activations with FP8 weights"
        )
    # Without an arena the op has its own gradient rule, and this call is never differentiated.
    x, weights, gate_up, down, gate_up_scale, down_scale, gate_up_bias, down_bias = (
        without_gradient(
            OP,
            (x, weights, gate_up, down, gate_up_scale, down_scale, gate_up_bias, down_bias),
            "x weights gate_up down gate_up_scale down_scale gate_up_bias down_bias",
        )
    )
    (tokens, features), top_k = x.shape, ids.shape[1]
    experts = gate_up.shape[1]
    width = gate_up.shape[2] // 2 if form is None else form.matrix(down.shape)[1]
    sizes: dict[str, Any] = {
        "tokens": tokens, "top_k": top_k, "experts": experts, "hidden": features,
        "expert_size": width,
    }  # fmt: skip
    config = config or _choose_config(form, gate_up_scale is not None, sizes)
    dtype = gate_up.dtype if gate_up_scale is None and form is None else x.dtype
    spec = scratch(**sizes, dtype=dtype, config=config)
    columns = config.columns
    rows = padded_rows(tokens, top_k, experts, columns)
    x = x.astype(dtype)
    left = None
    if listed is not None and columns == GROUP:
        work, x, left = listed
        if gate_up_bias is not None or activation is not None:
            left = None  # the h made with the list has neither
    elif supports_pairs(tokens, top_k) and columns == GROUP:
        if not copies(features):
            x = jnp.pad(x, ((0, GROUP - tokens), (0, 0)))
        work, x = align_small_batch(ids, x, experts, interpret=interpret)
    elif supports_sort(tokens, top_k, features):
        work, x = align_and_sort_tokens(ids, x, experts, columns, interpret=interpret)
    elif supports_permutation(tokens, top_k, features):
        work, x = permute_tokens(ids, x, experts, columns, interpret=interpret)
    else:
        work = align_tokens(ids, experts, columns)
        if work.tokens is None:
            x = jnp.pad(x, ((0, columns - tokens), (0, 0)))
        else:
            x = x[work.tokens]

    places, lanes = {}, {}
    # In an arena the results of both products would share a lane, if both had 16 bits.
    outputs = dtype if config.rounded and arena is None else jnp.float32
    for name, size, held in (("h", width, dtype), ("y", output_columns(features), outputs)):
        if arena is None:
            lane, first = jnp.empty((size // panel(size) * rows, panel(size)), held), 0
        else:
            lane, first = arena.lane(spec, name, width=panel(size))
        places[name], lanes[name] = PanelMatrix(first, rows, panel(size)), lane

    number = jnp.asarray(layer, jnp.int32).reshape(1)
    common: dict[str, Any] = {
        "layer": number, "affine": affine, "columns": columns, "form": form,
        "interpret": interpret,
    }  # fmt: skip
    if gate_up_scale is not None:  # gate's and up's blocks of rows, one after the other
        gate_up_scale = gate_up_scale.reshape(*gate_up_scale.shape[:2], -1, features // BLOCK)
    h_ref, y_ref = jax.new_ref(lanes["h"]), jax.new_ref(lanes["y"])
    grouped_product(
        x, gate_up, gate_up_scale, gate_up_bias,
        work if left is None else work._replace(total=left), h_ref, activation=activation,
        source=PanelMatrix(0, x.shape[0], features), results=places["h"], product=config.gate_up,
        gated=True, name="moe_gate_up", **common,
    )  # fmt: skip
    h = jax.freeze(h_ref)
    grouped_product(
        h, down, down_scale, down_bias, work, y_ref,
        source=places["h"], results=places["y"], product=config.down,
        gated=False, name="moe_down", **common,
    )  # fmt: skip
    y = jax.freeze(y_ref)
    results = ExpertOutputs(
        y, work.positions, weights, places["y"], features, config.combine, interpret
    )
    exact = features == output_columns(features)  # else the parts' reader lacks the last columns
    out = results if apart and exact else results.total
    if arena is None:
        return out
    return out, arena.with_lane(spec, "h", h).with_lane(spec, "y", y)
