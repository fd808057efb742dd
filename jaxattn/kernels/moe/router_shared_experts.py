"""Router, top-k gating and shared experts' gate and up products of a token, in one launch.

The routed experts of a token are known late: the router's product and the gating are two dependent
launches, during which hardly anything is read. The shared experts are known beforehand. So one
cluster of CTAs multiplies the router and does the gating, while other CTAs read gate and up of the
shared experts and write their rows of h. `mixture_of_experts` then computes the rest.

    cluster 0      logits = x @ router, each CTA some of K; the first CTA adds up and chooses
    clusters 1..   two CTAs for 64 columns of a shared expert: silu(x @ gate) * (x @ up)

A multiprocessor reads the 0.5 MB of these columns in 5 us, longer than the gating takes. So two
CTAs divide the K numbers, and read one another's sums.

The work list needs no sort: a token's experts are distinct, and so tile k is that of its k-th
expert.

The token may come without its norm. Then each CTA norms the numbers that it multiplies
(reduce/rms_norm_prologue.py).

Limits: one token, 64 experts (128 columns of a router in two halves), F a multiple of 128, I of 64,
bfloat16 or float16. With a norm F is 1024 or 2048.
Reference: `jaxattn.ops.moe.router_shared_experts` (implementation="xla"); tests:
tests/kernels/moe/test_router_shared_experts.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.arena import Arena
from jaxattn.core.dispatch import Refusal, without_gradient
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.hopper.reduce.rms_norm_prologue import (
    RmsNormPrologueParams,
    smem,
)
from jaxattn.kernels.moe.launch import scratch
from jaxattn.kernels.moe.panel_matrix import PanelMatrix, panel
from jaxattn.kernels.moe.router_shared_experts_cta import (
    COLUMNS,
    DEPTH,
    EXPERTS,
    MOST_NORMED,
    PARTS,
    SHARERS,
    STAGES,
    RouterExpertsConfig,
    RouterExpertsCta,
    RouterExpertsRefs,
)
from jaxattn.kernels.moe.routing.router import RoutedToken
from jaxattn.kernels.moe.routing.small_batch_alignment import PAIRS, supports_pairs
from jaxattn.kernels.moe.routing.token_alignment import EXPERT, FROM, GROUPS, TO, TokenAlignment
from jaxattn.kernels.moe.routing.topk_gating import THREADS, TopkGating
from jaxattn.kernels.moe.tile_config import GROUP, ROWS, padded_rows


def refusal(x: Any, router: Any, gate_up: Any, experts: int, top_k: int, always: int) -> str | None:
    """Returns why the kernel does not serve x [T, F], router [L, F, N], gate_up [L, E, 2 I, F], or
    None."""
    if x.shape[0] != 1 or not always or not supports_pairs(1, top_k + always):
        return (
            f"the kernel needs one token with at most {PAIRS} experts, of which at least one is "
            f"shared; got x {x.shape} and {always} shared experts"
        )
    if experts != EXPERTS or router.shape[-1] != COLUMNS:
        return (
            f"the kernel needs {EXPERTS} experts and no gate; got {experts} and router "
            f"{router.shape}"
        )
    if x.shape[1] % DEPTH or gate_up.shape[-2] % (2 * ROWS):
        return (
            f"the kernel needs F a multiple of {DEPTH} and I a multiple of {ROWS}; got gate_up "
            f"{gate_up.shape}"
        )
    if {router.dtype.name, gate_up.dtype.name} not in ({"bfloat16"}, {"float16"}):
        return (
            "the kernel needs router and gate_up in the same 16-bit dtype; got "
            f"{router.dtype.name}, {gate_up.dtype.name}"
        )
    return None


def supports_norm(features: int) -> bool:
    """Whether the kernel also supports the norm of a token."""
    return features % (PARTS * DEPTH) == 0 and features <= MOST_NORMED


def router_shared_experts_mosaic(
    x: jax.Array,
    router: jax.Array,
    bias: jax.Array | None,
    gate_up: jax.Array,
    *,
    experts: int,
    choice: dict[str, Any],
    always: int,
    layer: jax.Array,
    affine: tuple[int, int],
    valid: jax.Array | None,
    arena: Arena,
    norm: RmsNormPrologueParams | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, RoutedToken, Arena, jax.Array | None]:
    """Returns (ids, weights [1, K + always], the work list, the arena with the shared experts' h,
    and with a norm the sum, float32 [1, F]).

    Args:
        x: [1, F].
        router: The routers of all layers, in two halves: [L, F, 2 E].
        bias: The biases of all layers, float32 [L, E].
        gate_up: [L, E + always, 2 I, F].
        choice: The options of a `Router`.
        affine: (a, b), for the layer `a * layer + b`.
        valid: int32 [1], 0 for padding.
        norm: The norm of x + added, which comes first. x is then float32.
    """
    require_hopper("router_shared_experts", interpret=interpret)
    pairs = choice["top_k"] + always
    if why := refusal(x, router, gate_up, experts, choice["top_k"], always):
        raise Refusal(f"router_shared_experts: {why}")
    if norm is not None and not supports_norm(x.shape[1]):
        raise Refusal(
            f"router_shared_experts: the kernel normalizes only F = 1024 or 2048; got {x.shape[1]}"
        )
    x, router, bias, gate_up = without_gradient(
        "router_shared_experts", (x, router, bias, gate_up), "x router bias gate_up"
    )
    dtype = router.dtype
    x = x.astype(dtype if norm is None else jnp.float32)
    features, width = x.shape[1], gate_up.shape[2] // 2
    spec = scratch(
        tokens=1, top_k=pairs, experts=EXPERTS + always, hidden=features, expert_size=width,
        dtype=dtype,
    )  # fmt: skip
    lane, first = arena.lane(spec, "h", width=panel(width))
    rows = padded_rows(1, pairs, EXPERTS + always, GROUP)
    cut = RouterExpertsConfig(
        always=always,
        width=width,
        steps=features // DEPTH,
        affine=affine,
        results=PanelMatrix(first, rows, panel(width)),
        choice=TopkGating(**choice, experts=EXPERTS, interpret=interpret),
        interpret=interpret,
    )
    # The interpreter's copies end with the array; on a GPU TMA reads zeros past it.
    num_tail_rows = GROUP - 1 if interpret else 0
    if norm is None:
        x = jnp.pad(x, ((0, num_tail_rows), (0, 0)))
    h_ref, tiled = jax.new_ref(lane), swizzled(dtype)
    tiles = 1 + -(-cut.items * SHARERS // PARTS)
    ints = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)  # noqa: E731
    scores = plgpu.SMEM((cut.choice.width,), jnp.float32)
    normed = None if norm is None else norm.constants
    out = launch(
        lambda **refs: RouterExpertsCta(cut, normed, RouterExpertsRefs(**refs)).run(),
        name="moe_open",
        grid={"tile": tiles},
        cluster={"part": PARTS},
        inputs={
            "x": x,
            "router": router,
            "bias": bias,
            "gate_up": gate_up,
            "layer": jnp.asarray(layer, jnp.int32).reshape(1),
            "valid": valid,
            "h": h_ref,
            "interpreter_sums": jax.new_ref(jnp.zeros((tiles, 2, PARTS, COLUMNS)))
            if interpret
            else None,
            "interpreter_shared_sums": jax.new_ref(jnp.zeros((tiles, PARTS, 2, ROWS, GROUP)))
            if interpret
            else None,
            "added": None if norm is None else norm.added,
            "norms": None if norm is None else norm.weights,
        },
        outputs={
            "ids": ints(1, pairs),
            "weights": jax.ShapeDtypeStruct((1, pairs), jnp.float32),
            "tiles": ints(len((EXPERT, FROM, TO, GROUPS)), PAIRS),
            "total": ints(PAIRS),
            "left": ints(PAIRS),
            "positions": ints(PAIRS),
            "summed": None if norm is None else jax.ShapeDtypeStruct(x.shape, jnp.float32),
            "normed": None
            if norm is None
            else jax.ShapeDtypeStruct((1 + num_tail_rows, features), dtype),
        },
        scratch={
            "ring": plgpu.SMEM((STAGES, 2, ROWS, DEPTH), dtype, transforms=tiled),
            "x_smem": plgpu.SMEM((STAGES, GROUP, DEPTH), dtype, transforms=tiled)
            if norm is None
            else smem(features // (ROWS * SHARERS), dtype, interpret=interpret),
            "out_smem": plgpu.SMEM((GROUP, ROWS), dtype, transforms=tiled),
            "sums_smem": plgpu.SMEM((GROUP, COLUMNS), jnp.float32),
            "shared_smem": plgpu.SMEM((2, ROWS, GROUP), jnp.float32),
            "logits_smem": plgpu.SMEM((EXPERTS + THREADS,), jnp.float32),
            "bias_smem": None if bias is None else scores,
            **cut.choice.scratch(),
            "loaded": plgpu.Barrier(num_arrivals=2 + (norm is None), num_barriers=STAGES),
            "bias_loaded": None if bias is None else plgpu.Barrier(num_arrivals=1),
            "cluster_barrier": plgpu.ClusterBarrier(collective_axes=("part",))
            if interpret
            else None,
        },
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    work = TokenAlignment(out["tiles"], out["total"], out["positions"], None)
    arena = arena.with_lane(spec, "h", jax.freeze(h_ref))
    x, total = (x, None) if norm is None else (out["normed"], out["summed"])
    return out["ids"], out["weights"], RoutedToken(work, x, out["left"]), arena, total
