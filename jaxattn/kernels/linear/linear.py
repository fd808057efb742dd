"""Products of a few tokens with matrices of a layer, read in place from their stacks.

    y^T [128, T] = W^T x^T          W^T: 128 columns of a matrix [K, N], seen transposed

Weights are the rows (M) of wgmma and tokens its columns (N), so that few tokens cost few columns
(swap AB). The time is that of reading the weights, so many CTAs read at once. `parts` CTAs, a
cluster, divide the K numbers of 128 columns (split-K), and each has `stages` copies in flight from
the start. Then the CTAs of a cluster add up their sums, each some of the tokens', in the order of
the CTAs.

Several matrices of one x are one launch: q and kv_a of an attention layer, or gate and up, of which
silu(gate) * up is stored. So are the products of heads that each have numbers of x and a matrix of
their own, [L * heads, K, N]. Rotated dims may follow them (rope_epilogue.py). Several matrices may
also each have their own numbers of x. A token's result does not depend on the other tokens.

Products may have biases, which are added before a result is rounded.

A matrix of 64 columns counts as one of 128: TMA reads zeros past its end.

The norm of a token may come first (reduce/rms_norm_prologue.py).

Limits: 32 tokens, 4 with matrices above 32 MiB; K and N multiples of 64; bfloat16 or float16. Heads
with rotated dims have N a multiple of 128. With a norm: one token.
Reference and tests: `jaxattn.ops.linear.linear` (implementation="xla"),
tests/kernels/linear/test_linear.py.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS, require_hopper
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.hopper.reduce.rms_norm_prologue import RmsNormPrologueParams, smem
from jaxattn.kernels.hopper.reduce.rms_norm_prologue import refusal as refusal_of_norm
from jaxattn.kernels.linear.cta import ROWS, STEP, LinearConfig, LinearCta, LinearRefs
from jaxattn.kernels.linear.rope_epilogue import DIMS, NUMBERS, RopeEpilogueParams

type Shaped = jax.Array | jax.ShapeDtypeStruct

OP = "linear_layer"
MOST_TOKENS = 32  # with more, XLA's product is as fast
# For matrices of more bytes, XLA's product of more tokens than MOST_LARGE is faster.
LARGE_BYTES, MOST_LARGE = 32 * 2**20, 4
MOST_PARTS = 8  # CTAs of a cluster, on any Hopper GPU
BLOCK_BYTES = 72 * 1024  # of copies: three CTAs share a multiprocessor
MOST_SUMMED = 32  # numbers of the addend's rows that a thread reads


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearTileConfig:
    """The tiling of a launch.

    Attributes:
        parts: CTAs that divide the K numbers of 128 columns.
        stages: Copies that a CTA has in flight.
    """

    parts: int
    stages: int


def choose(
    *, tiles: int, steps: int, columns: int, gated: bool, normed: bool = False
) -> LinearTileConfig:
    """Returns the fewest parts with which all multiprocessors have two CTAs, if there are as many.

    Parts are a power of two, unless a norm of K needs other ones, as that of 2,304 does.
    """
    parts, many = 1, 1 + gated
    while parts < MOST_PARTS and tiles * parts < 2 * NUM_SMS and steps >= 4 * parts:
        parts *= 2
    if normed:
        others = (*range(parts, MOST_PARTS + 1), *range(parts - 1, 0, -1))
        parts = next((each for each in others if not refusal_of_norm(1, steps, each)), parts)
    mine, room = -(-steps // parts), BLOCK_BYTES
    stage = STEP * (ROWS * many + columns) * 2
    if normed:  # each CTA has the whole token, and the sums count
        stage = STEP * ROWS * many * 2
        room -= columns * (STEP * 2 * mine + ROWS * 4 * many)
    stages = max(2, min(mine, room // stage))
    if normed and tiles * parts > 3 * NUM_SMS:
        stages = 2  # five CTAs share a multiprocessor then, and all run at a time
    return LinearTileConfig(parts=parts, stages=stages)


def refuse(
    x: Shaped,
    weights: Sequence[Shaped],
    *,
    gated: bool = False,
    least: int = STEP,
    interpret: bool = False,
) -> None:
    """Raises `Refusal`, with the reason, if the kernel does not serve the call."""
    require_hopper(OP, interpret=interpret)
    if why := refusal(x.shape, x.dtype, weights, gated=gated, least=least):
        raise Refusal(f"{OP}: {why}")


def refusal(
    x: tuple[int, ...],
    dtype: Any,
    weights: Sequence[Shaped],
    *,
    gated: bool = False,
    least: int = STEP,
) -> str | None:
    """Returns why the kernel does not serve x [T, K] of this dtype, or None.

    Args:
        least: The least columns of a matrix.
    """
    tokens, inner = x
    large = max(math.prod(each.shape[1:]) * each.dtype.itemsize for each in weights) > LARGE_BYTES
    most = MOST_LARGE if large else MOST_TOKENS
    if not 0 < tokens <= most:
        size = " for matrices of this size" if large else ""
        return f"the kernel supports 1 to {most} tokens{size}; got x {x}"
    for weight in weights:
        if inner % STEP or weight.shape[-1] < least or weight.shape[-1] % STEP:
            return (
                f"the kernel needs K and N multiples of {STEP}, and N at least {least}; got "
                f"weights {weight.shape}"
            )
        if weight.dtype not in (jnp.bfloat16, jnp.float16) or weight.dtype != dtype:
            return (
                "the kernel needs x and weights both in bfloat16 or both in float16; got "
                f"{dtype.name} and {weight.dtype.name}"
            )
    return None


def refusal_with_norm(tokens: int, inner: int, weights: Sequence[Shaped]) -> str | None:
    """Returns why one launch cannot compute a norm of K numbers and these products; None if it
    can."""
    if why := refusal((tokens, inner), weights[0].dtype, weights):
        return why
    tiles = sum(-(-each.shape[-1] // ROWS) for each in weights)
    config = choose(tiles=tiles, steps=inner // STEP, columns=8, gated=False, normed=True)
    return refusal_of_norm(tokens, inner // STEP, config.parts)


def sums_parts(weights: Sequence[Shaped], rows: int) -> bool:
    """Whether the launch should sum up `rows` addend rows for the norm of their sum.

    Each CTA reads its numbers of every row. 44 of them in each thread (Qwen3-Next) took 1.6 us
    more, as long as a launch that sums; 16 (DeepSeek-V2-Lite) took 0.8 us (H200).
    """
    tiles, inner = sum(-(-each.shape[-1] // ROWS) for each in weights), weights[0].shape[-2]
    config = choose(tiles=tiles, steps=inner // STEP, columns=8, gated=False, normed=True)
    return rows * (inner // (config.parts * ROWS)) <= MOST_SUMMED


def linears_mosaic(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    layer: jax.Array | int,
    affine: tuple[int, int] = (1, 0),
    out_dtypes: Sequence[Any],
    gated: bool = False,
    heads: int = 1,
    spare_heads: int = 0,
    rope: RopeEpilogueParams | None = None,
    split: bool = False,
    norm: RmsNormPrologueParams | None = None,
    biases: Sequence[jax.Array] | None = None,
    config: LinearTileConfig | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """Returns `x @ weight[layer]` for each stack of weights, or silu of the first's times the
    second's.

    Args:
        x: [T, K], or with heads [T, heads * K], possibly followed by further numbers.
        weights: [L, K, N] each; with `gated`, two of one shape; with heads, one [L * heads, K, N].
        affine: (a, b), for the layer `a * layer + b`.
        out_dtypes: The dtypes of the results, [T, N] or with heads [T, heads * N].
        heads: The number of heads; each multiplies K numbers of x by its own matrix.
        spare_heads: Heads of the result after the others; their contents are undefined.
        rope: The rotation of heads: K + 64 numbers of x belong to a head, and N + 64 of the
            result. The 64 are rotated. Then N is a multiple of 128.
        split: Whether each matrix multiplies its own K numbers of x, x being [T, matrices * K].
        norm: The norm of x + added, which comes before the products. x is then float32 [1, K].
            After the products the list has x + added, float32 [1, K]. With `norm.gives` it also has
            the normed token, in the weights' dtype.
        biases: [L, N or more] of each matrix; neither with `gated` nor with heads. An XLA launch
            pads fewer than 128 numbers.
    """
    num_rotated_dims = 0 if rope is None else DIMS
    tokens, inner = x.shape[0], weights[0].shape[-2]
    dtype = x.dtype if norm is None else weights[0].dtype
    refuse(
        jax.ShapeDtypeStruct((tokens, inner), dtype), weights, gated=gated,
        least=STEP if rope is None else ROWS, interpret=interpret,
    )  # fmt: skip
    columns = -(-tokens // 8) * 8
    steps = inner // STEP
    widths = [weights[0].shape[-1]] if gated else [each.shape[-1] for each in weights]
    sizes = [max(width, ROWS) for width in widths]
    tiles = [-(-size // ROWS) for size in sizes]
    config = config or choose(
        tiles=heads * sum(tiles), steps=steps, columns=columns, gated=gated, normed=norm is not None
    )
    parts, stages = config.parts, config.stages
    if norm is not None and (why := refusal_of_norm(tokens, steps, parts)):
        raise Refusal(f"{OP}: {why}")
    cut = LinearConfig(
        parts=parts,
        stages=stages,
        tokens=tokens,
        columns=columns,
        steps=steps,
        sizes=tuple(sizes),
        affine=affine,
        gated=gated,
        heads=heads,
        num_rotated_dims=num_rotated_dims,
        split=split,
        interpret=interpret,
    )
    tiled, many = swizzled(dtype), 1 + gated
    apart = None
    if interpret and parts > 1:  # whose CTAs share no shared memory
        apart = jnp.zeros((parts, heads * sum(tiles), many, columns, ROWS), jnp.float32)
    if interpret:
        narrow = [max(ROWS - each.shape[-1], 0) for each in weights]
        pads = [((0, 0), (0, 0), (0, more)) for more in narrow]
        weights = [jnp.pad(each, pad) for each, pad in zip(weights, pads, strict=True)]
    # TMA steps in the shared memory's tiles of 8 rows, and reads zeros past x's end.
    if norm is None and (interpret or (tokens > 8 and tokens % 8)):
        x = jnp.pad(x, ((0, columns - tokens), (0, 0)))
    if biases is not None:
        biases = tuple(
            jnp.pad(each, ((0, 0), (0, ROWS - each.shape[1]))) if each.shape[1] < ROWS else each
            for each in biases
        )
    turns = None if rope is None else rope.constants
    norms = None if norm is None else norm.constants
    out = launch(
        lambda **refs: LinearCta(cut, turns, norms, LinearRefs(**refs)).run(),
        name="linear_layer",
        grid={"tile": heads * sum(tiles)},
        cluster={"part": parts} if parts > 1 else {},
        inputs={
            "x_ref": x,
            "weights_refs": tuple(weights),
            "layer_ref": jnp.asarray(layer, jnp.int32).reshape(1),
            "cluster_sums_ref": None if apart is None else jax.new_ref(apart),
            "angles_ref": None if rope is None else rope.angles,
            "biases_refs": biases,
            **({} if norm is None else norm.operands),
        },
        outputs={
            "out_refs": tuple(
                jax.ShapeDtypeStruct(
                    (tokens, (heads + spare_heads) * (size + num_rotated_dims)), dtype
                )
                for size, dtype in zip(sizes, out_dtypes, strict=True)
            ),
            "total_ref": None if norm is None else jax.ShapeDtypeStruct(x.shape, jnp.float32),
            "normed_ref": jax.ShapeDtypeStruct(x.shape, dtype) if norm and norm.gives else None,
        },
        scratch={
            "x_smem": plgpu.SMEM((stages, columns, STEP), dtype, transforms=tiled)
            if norm is None
            else smem(steps // parts, dtype, interpret=interpret),
            "w_smem": plgpu.SMEM((stages, many, STEP, ROWS), dtype, transforms=tiled),
            "sums_smem": plgpu.SMEM((many, columns, ROWS), jnp.float32),
            "turn_smem": None if rope is None else plgpu.SMEM((NUMBERS,), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=(norm is None) + many, num_barriers=stages),
            "cluster_barrier": None
            if apart is None
            else plgpu.ClusterBarrier(collective_axes=("part",)),
        },
        warpgroups=1 if norm is None else None,  # reductions over a warpgroup need no such axis
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    products = (
        y
        if size == width
        else y.reshape(tokens, heads, size)[..., :width].reshape(tokens, heads * width)
        for y, size, width in zip(out["out_refs"], sizes, widths, strict=True)
    )
    return [*products, *(out[each] for each in ("total_ref", "normed_ref") if each in out)]
