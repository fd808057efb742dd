"""The gated delta rule's pass over the chunks of a sequence, with the state in registers.

A warpgroup owns 64 of the 128 rows of a (run of chunks, value head)'s state: a row is one value
channel, and rows never meet. The two of a state share a block, or have one each where that leaves
no SM without work; a further one issues the TMA copies, and draws what the block does next from
attention/work_queue.py; and one more may norm what comes out, see norm_epilogue.py. With everything
transposed, so that the value channels are the rows of every wgmma, per chunk of 64 tokens

    W^T = V^T + read * (S K^T)                          S [64, Dk] float32, rounded to be an operand
    U^T = W^T X^T
    O^T = out * (S Q^T) + U^T P^T
    S   = decay S + (write * U^T) K

The left operand of every product is made of the product before it and stays in registers; X, P and
the vectors come from intra_chunk/launch.py. Nothing passes between those two warpgroups.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.kernels.gdn.prefill.inter_chunk import norm_epilogue
from jaxattn.kernels.gdn.prefill.inter_chunk.mainloop import (
    InterChunkConfig,
    InterChunkCta,
    InterChunkRefs,
    scratch_types,
)
from jaxattn.kernels.gdn.prefill.inter_chunk.norm_epilogue import NormEpilogueParams
from jaxattn.kernels.gdn.prefill.inter_chunk.state_update import first_run
from jaxattn.kernels.gdn.prefill.tiles import DIM, compiler_params
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS


def halves_in_a_block(states: int) -> int:
    """Of a state, 1 or 2: with one to a block its SM's tensor cores are a warpgroup's own."""
    return 1 if 2 * states <= NUM_SMS else 2


def norms_inside(norm: NormEpilogueParams, dtype: Any, states: int) -> bool:
    """Whether `output_pass` norms: both halves of a head's channels have to be in one block."""
    return halves_in_a_block(states) == 2 and norm_epilogue.fits(norm, dtype)


def output_pass(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    x: jax.Array,
    p: jax.Array,
    vectors: jax.Array,
    runs: jax.Array,
    drawn: jax.Array,
    *,
    written: jax.Array | None = None,
    starts: jax.Array | None,
    layer: jax.Array,
    finals: jax.Array | int,
    kept: jax.Array | None = None,
    norm: NormEpilogueParams | None = None,
    busy: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of every run, and the states after those that ask for it.

    Args:
        q, k: [T, Hk, 128]; v: [T, Hv, 128]. What lies outside the runs may be NaN.
        x, p, vectors: from `chunk_matrices`.
        written: where channels have decays of their own [N, Hv, 64, 128], and then q and k are of
            that shape and vectors [N, Hv, 2, 64], see kda_intra_chunk/launch.py.
        runs: int32 [7, N + 1 + R], a column for each chunk of x and one more, and then the runs,
            with the rows above, padding last.
        starts: float32 [1, n, Hv, 128, 128], where the runs' BEFORE is a row; None: in the pool.
        drawn: int32 [1], 0: for attention/work_queue.py.
        layer: int32 [1], of the pool.
        finals: the pool [L, Z, Hv, 128, 128], float32 or bfloat16, where AFTER is a slot, updated
            in place; or the number of states of a new one of a single layer.
        kept: int32 [N], the slot in the pool that takes the state after each chunk, or -1.
        norm: what becomes of the outputs, if `norms_inside`; None leaves them as they are.
        busy: about how many of the runs have chunks, known when traced.

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
        keeps=kept is not None,
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
    if kept is None:
        kept = jnp.zeros(1, jnp.int32)
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
        "kept_ref": kept,
        "starts_ref": starts,
        # A new ref is one for each row of a vmap, whatever it is that has rows.
        "drawn_ref": jax.new_ref(drawn),
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
