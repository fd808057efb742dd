"""The grouped GEMM of a mixture of experts: one of its two products, over the items of a work list.

Weights, in their published layout, are the 64-row side (M) of wgmma and tokens its columns (N), so
that few tokens cost few columns (swap AB). With `narrow` a tile of fewer tokens than N is
multiplied with fewer columns:

    gate_up    h^T [64, N] = silu(gate x^T) * (up x^T)      gate, up [64, K = F] of an expert
    down       y^T [64, N] = down h^T                       down     [64, K = I]

A gradient with respect to the tokens is the same product with transposed weights, which are then
[K, 64] of an expert: wgmma accepts either order. Training also saves gate x^T and up x^T.

An item is a tile of N tokens of one expert and 64 or 128 rows of its weights. A persistent CTA per
multiprocessor processes items b, b + blocks and so on. Its last warpgroup issues the TMA copies
into a ring of `stages` steps of K, the next item's too. One or two consumer warpgroups multiply,
each its own 64 rows (of gate and up, or of `parts` tiles of down). A sum over K has one order
whatever the tiling, so a token's result does not depend on the other tokens.

Products of 16-bit weights may have a bias, and the activation may differ from SwiGLU (gpt-oss).

FP8 weights are widened in registers on their way to wgmma (hopper/fp8_conversion.py). Each step's
FP8 product, of 128 of K, has a scale, which multiplies it as it is added to the sum, in float32.
4-bit weights are widened in the same way, with their scales (hopper/four_bit_mainloop.py).
If few multiprocessors have an item, gate has one warpgroup and up another. Up's sums then go
through shared memory to gate's warpgroup.

Results are stored transposed, tokens as rows, in panels: [width / w, R, w] for w columns of each.

Limits: K a multiple of 64, rows of weights of `GemmTileConfig.rows` * parts; bfloat16 or float16.
With FP8 weights K is a multiple of 128, and 4-bit weights are whole tiles.
Reference and tests: `jaxattn.ops.moe.experts` (implementation="xla"),
tests/kernels/moe/test_kernel.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.core.numerics.swiglu import ClampedSwiGLU
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.four_bit_dequantization import LINE
from jaxattn.kernels.hopper.four_bit_mainloop import lines_of_step
from jaxattn.kernels.hopper.fp8_conversion import SWIZZLED
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.moe.four_bit_tile_config import lines
from jaxattn.kernels.moe.grouped_gemm_mainloop import (
    GroupedGemmConfig,
    GroupedGemmCta,
    GroupedGemmRefs,
)
from jaxattn.kernels.moe.panel_matrix import PanelMatrix
from jaxattn.kernels.moe.routing.token_alignment import (
    TokenAlignment,
)
from jaxattn.kernels.moe.tile_config import (
    ROWS,
    GemmTileConfig,
    stages_of,
)


def grouped_product(
    tokens: jax.Array,
    weights: jax.Array,
    scales: jax.Array | None,
    biases: jax.Array | None,
    work: TokenAlignment,
    target: Any,
    *,
    activation: ClampedSwiGLU | None = None,
    layer: jax.Array,
    affine: tuple[int, int],
    source: PanelMatrix,
    results: PanelMatrix,
    saved: Any = None,
    transposed: bool = False,
    columns: int,
    product: GemmTileConfig,
    gated: bool,
    name: str,
    form: FourBitFormat | None = None,
    interpret: bool = False,
) -> dict[str, jax.Array]:
    """Computes the product of each tile of tokens with its expert's weights, and stores it to
    `target`.

    Args:
        tokens: A 2-D array of bfloat16 or float16, in which `source` locates the tokens.
        weights: [L, E, rows, K] of the tokens' dtype, or float8_e4m3fn; or tiles, uint8
            [L, E, ...].
        scales: For FP8 weights, float32 [L, E, blocks of rows, blocks of K]; gate's before up's.
        biases: [L, E, rows], for 16-bit weights.
        activation: The activation of gate_up; None is silu(gate) * up.
        target: A ref of a 2-D array, which is written, or the `jax.ShapeDtypeStruct` of a new one,
            which is returned by the name "target": rows of h in the tokens' dtype, of y in that or
            float32.
        layer: int32 [1]; the layer is `affine[0] * layer + affine[1]`.
        results: The location of the results in `target`.
        saved: The `jax.ShapeDtypeStruct` of a new array [R, rows] of gate x and up x, in the
            tokens' dtype, returned by the name "saved"; None saves neither.
        transposed: Whether weights are [L, E, K, rows], of 16 bits.
        columns: N.
        gated: Whether this is gate_up, and its result h.
        form: The format of tiles.
    """
    if form is None:
        height, depth = weights.shape[-2:][:: -1 if transposed else 1]
    else:
        weights, depth = lines(weights), form.matrix(weights.shape)[1]
        height = weights.shape[2] * ROWS
    dtype, out_dtype = tokens.dtype, jnp.dtype(target.dtype)
    stages = stages_of(product, columns, dtype.name, out_dtype.name, weights.dtype.name)
    pieces = height // (product.rows * product.parts)
    blocks = min(product.blocks, work.tiles.shape[1] * pieces)
    cut = GroupedGemmConfig(
        product=product,
        columns=columns,
        stages=stages,
        steps=depth // product.depth,
        part_stride=height // 2 if gated else product.rows,
        pieces=pieces,
        blocks=blocks,
        affine=affine,
        gated=gated,
        activation=activation,
        source=source,
        results=results,
        form=form,
        transposed=transposed,
        interpret=interpret,
    )
    tiled = swizzled(dtype)
    of_weights = tiled if scales is None else SWIZZLED
    consumers, parts = product.consumers, product.parts
    tile = (ROWS, product.depth)[:: -1 if transposed else 1]
    if form is not None:
        of_weights, tile = (), (lines_of_step(form, product.depth), LINE)
    ring = (stages, parts, consumers, *tile)
    pieces_of_tokens = 1 if form is None else product.depth // form.columns
    of_tokens = (stages, pieces_of_tokens, columns, product.depth // pieces_of_tokens)
    where = {"target": target}
    is_new = isinstance(target, jax.ShapeDtypeStruct)
    return launch(
        lambda **refs: GroupedGemmCta(cut, GroupedGemmRefs(**refs)).run(),
        name=name,
        grid={"block": blocks},
        inputs={
            "tokens": tokens,
            "weights": weights,
            "tiles": work.tiles,
            "total": work.total,
            "layer": layer,
            "scales": scales,
            "biases": biases,
            **({} if is_new else where),
        },
        outputs={**(where if is_new else {}), "saved": saved},
        scratch={
            "weights_smem": plgpu.SMEM(ring, weights.dtype, transforms=of_weights),
            "tokens_smem": plgpu.SMEM(of_tokens, dtype, transforms=tiled),
            "out_smem": plgpu.SMEM(
                (consumers, columns, ROWS), out_dtype, transforms=swizzled(out_dtype)
            ),
            "up_smem": plgpu.SMEM((ROWS, columns), jnp.float32) if product.split else None,
            "loaded": plgpu.Barrier(
                num_arrivals=parts * consumers + pieces_of_tokens, num_barriers=stages
            ),
            "read": plgpu.Barrier(num_arrivals=product.warpgroups, num_barriers=stages),
            "up_ready": plgpu.Barrier(num_arrivals=1) if product.split else None,
            "up_read": plgpu.Barrier(num_arrivals=1) if product.split else None,
        },
        warpgroups=product.warpgroups + 1,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
