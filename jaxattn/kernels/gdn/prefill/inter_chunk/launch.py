"""The gated delta rule's pass over the chunks of a sequence, with the state in registers.

A warpgroup owns 64 of the 128 rows of the state of a (run of chunks, value head): a row is one
value channel, and rows are independent. The two warpgroups of a state share a CTA, or have one each
where that leaves no SM idle. A further warpgroup issues the TMA copies, and draws the CTA's next
item from attention/work_queue.py; another one may norm the output, see norm_epilogue.py. With
everything transposed, so that the value channels are the rows of every wgmma, per chunk of 64
tokens

    W^T = V^T + read * (S K^T)                          S [64, Dk] float32, rounded to be an operand
    U^T = W^T X^T
    O^T = out * (S Q^T) + U^T P^T
    S   = decay S + (write * U^T) K

The left operand of every product comes from the product before it and stays in registers; X, P and
the vectors come from intra_chunk/launch.py. The two consumer warpgroups exchange nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.kernels.gdn.chunk.tiles import DIM, compiler_params
from jaxattn.kernels.gdn.prefill.chunk_plan import first_run
from jaxattn.kernels.gdn.prefill.inter_chunk import norm_epilogue
from jaxattn.kernels.gdn.prefill.inter_chunk.mainloop import (
    InterChunkConfig,
    InterChunkCta,
    InterChunkRefs,
    scratch_types,
)
from jaxattn.kernels.gdn.prefill.inter_chunk.norm_epilogue import NormEpilogueParams
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS


def halves_in_a_block(states: int) -> int:
    """Returns the halves of a state per CTA, 1 or 2: with one per CTA a warpgroup has its SM's
    tensor cores to itself."""
    return 1 if 2 * states <= NUM_SMS else 2


def norms_inside(norm: NormEpilogueParams, dtype: Any, states: int) -> bool:
    """Whether `output_pass` norms: both halves of a head's channels must be in one CTA."""
    return halves_in_a_block(states) == 2 and norm_epilogue.fits(norm, dtype)


def output_pass(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    x: jax.Array,
    p: jax.Array,
    vectors: jax.Array,
    runs: jax.Array,
    counter: jax.Array,
    *,
    written: jax.Array | None = None,
    starts: jax.Array | None,
    layer: jax.Array,
    finals: jax.Array | int,
    checkpoint_slots: jax.Array | None = None,
    norm: NormEpilogueParams | None = None,
    busy: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of every run, and the states after those runs that request it.

    Args:
        q, k: [T, Hk, 128]; v: [T, Hv, 128]. Numbers outside of the runs may be NaN.
        x, p, vectors: Those of `chunk_matrices`.
        written: [N, Hv, 64, 128] for decays per channel; then q and k have this shape too and
            vectors are [N, Hv, 2, 64], see kda_intra_chunk/launch.py.
        runs: int32 [7, N + 1 + R], a column for each chunk of x and one more, and then the runs,
            with the rows of chunk_plan.py, padding last.
        starts: float32 [1, n, Hv, 128, 128], of which a run's BEFORE is a row; None: BEFORE is a
            slot of the pool.
        counter: int32 [1], 0: for attention/work_queue.py.
        layer: int32 [1], the layer of the pool.
        finals: The pool [L, Z, Hv, 128, 128], float32 or bfloat16, of which AFTER is a slot,
            updated in place; or the number of states of a new pool with a single layer.
        checkpoint_slots: int32 [N], the slot of the pool that receives the state after each chunk,
            or -1.
        norm: The norm of the outputs, if `norms_inside`; None leaves them as they are.
        busy: The approximate number of runs with chunks, known when traced.

    Returns:
        o [T, Hv, 128] in v's dtype, and the pool.
    """
    value_heads, dtype = v.shape[1], v.dtype
    halves, normed = halves_in_a_block(busy * value_heads), norm is not None
    # The heads of a run share keys in L2.
    items = (runs.shape[1] - first_run(x)) * value_heads * 2 // halves
    blocks = min(items, NUM_SMS)
    cut = InterChunkConfig(
        blocks=blocks,
        items=items,
        halves=halves,
        heads=value_heads,
        group=1 if written is not None else value_heads // k.shape[1],
        from_pool=starts is None,
        keeps=checkpoint_slots is not None,
        eps=None if norm is None else norm.eps,
        channels=written is not None,
        dtype=dtype,
        interpret=interpret,
    )
    pool, new = None, None
    if isinstance(finals, int):
        new = jax.ShapeDtypeStruct((1, finals, value_heads, DIM, DIM), jnp.float32)
    else:
        pool = jax.new_ref(finals)
    if starts is None:
        starts = jnp.zeros((1, 0, value_heads, DIM, DIM), jnp.float32)
    if checkpoint_slots is None:
        checkpoint_slots = jnp.zeros(1, jnp.int32)
    inputs = {
        "q_ref": q,
        "k_ref": k,
        "written_ref": written,
        "v_ref": v,
        "x_ref": x,
        "p_ref": p,
        "vectors_ref": vectors,
        "runs_ref": runs,
        "layer_ref": layer,
        "kept_ref": checkpoint_slots,
        "starts_ref": starts,
        # A new ref exists once for each row of a vmap, whichever operand is mapped.
        "drawn_ref": jax.new_ref(counter),
        **norm_epilogue.operands(norm, interpret=interpret),
    }
    o_type = jax.ShapeDtypeStruct(v.shape, dtype)
    out = launch(
        lambda **refs: InterChunkCta(cut, InterChunkRefs(**refs)).run(),
        name="gdn_prefill_output",
        grid={"block": blocks},
        inputs=inputs if pool is None else {**inputs, "pool_ref": pool},
        outputs={"o_ref": o_type} if pool is not None else {"pool_ref": new, "o_ref": o_type},
        scratch=scratch_types(cut),
        warpgroups=halves + 1 + normed,
        compiler_params=compiler_params(),
        interpret=interpret,
    )
    return out["o_ref"], out["pool_ref"] if pool is None else jax.freeze(pool)
