"""Kimi's delta rule in one launch: some blocks make chunks, and others pass states over them.

Apart, the first kernel waits for memory and the second for its chain of products. Together they
hide each other's waits, and what is made is taken from L2. The blocks and bodies are those of
channel_chunk.py and state_pass.py; handover.py lets a block wait for a chunk.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxattn.kernels.gdn_prefill import channel_body, channel_chunk, output_body, state_pass
from jaxattn.kernels.gdn_prefill.handover import Handover, none_yet
from jaxattn.kernels.gdn_prefill.tiles import CHUNK, compiler_params
from jaxattn.kernels.hopper.launch import launch
from jaxattn.kernels.hopper.machine import NUM_SMS

# Microseconds of a chunk of a head: to make it, and in the pass, by halves of a state in a block.
# Guesses, until a GPU has said.
MAKING, PASSING = 2.9, {1: 1.1, 2: 1.9}
# What the pass knows a chunk's parts by.
TAKEN = ("q_ref", "k_ref", "written_ref", "x_ref", "p_ref", "vectors_ref")


def shares(length: int, count: int, value_heads: int) -> tuple[int, int]:
    """Blocks that make chunks, of all that an SM each has, and halves of a state in a block of the
    others, for T, n and Hv."""
    chunks, each = -(-length // CHUNK), -(-length // (count * CHUNK))

    def time(makers: int, halves: int) -> tuple[float, float]:
        turns = -(-count * value_heads * 2 // (halves * (NUM_SMS - makers)))
        made, passed = MAKING * chunks * value_heads / makers, turns * each * PASSING[halves]
        return max(made, passed), min(made, passed)

    every = ((makers, halves) for makers in range(1, NUM_SMS) for halves in PASSING)
    return min(every, key=lambda cut: time(*cut))


def channel_pass(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    table: jax.Array,
    count: int,
    *,
    scale: float,
    use_qk_l2norm: bool,
    layer: jax.Array,
    starts: jax.Array | None,
    finals: jax.Array | int,
    kept: jax.Array | None,
    makers: int,
    halves: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of every run, and the states after those that ask for it.

    Args:
        q, k, g, beta, count, scale, use_qk_l2norm: as `channel_chunks` has them.
        v, layer, starts, finals, kept: as `output_pass` has them.
        table: the plan's, chunks and runs.
        makers, halves: by `shares`.

    Returns:
        o [T, Hv, 128] in v's dtype, and the pool.
    """
    making = channel_chunk.prepared(
        q, k, g, beta, table, count, scale=scale, use_qk_l2norm=use_qk_l2norm, blocks=makers,
        last_first=False, interpret=interpret,
    )  # fmt: skip
    makers = making.cut.blocks
    rows, x, p, vectors = (making.outputs[channel_chunk.OUTPUTS[i]] for i in (0, 3, 4, 5))
    passing = state_pass.prepared(
        rows, rows, v, x, p, vectors, table, none_yet(table, (1,)).astype(jnp.int32), written=rows,
        starts=starts, layer=layer, finals=finals, kept=kept, norm=None, halves=halves,
        blocks=NUM_SMS - makers, interpret=interpret,
    )  # fmt: skip
    heads = v.shape[1]
    counts = jax.new_ref(none_yet(table, (count * heads,)))
    of_pass = {name: x for name, x in passing.inputs.items() if name not in TAKEN}
    made = dict(zip(channel_chunk.OUTPUTS, TAKEN, strict=True))
    # Both have keys and queries: a maker's are tokens, the pass has those that were made.
    tokens = {f"tokens_{name}": x for name, x in making.inputs.items()}

    def body(counts_ref: Any, **refs: Any) -> None:
        handover = Handover(
            counts=counts_ref, heads=heads, parts=channel_body.WARPGROUPS, interpret=interpret
        )
        block = lax.axis_index("block")

        def make(**scratch: Any) -> None:
            given = {name: refs[f"tokens_{name}"] for name in making.inputs}
            given |= {name: refs[taken] for name, taken in made.items()}
            all_refs = channel_body.Refs(**given, **scratch)
            channel_body.Block(making.cut, all_refs, handover.done).run()

        def take(**scratch: Any) -> None:
            given = {name: refs.get(name) for name in (*passing.inputs, *passing.outputs)}
            all_refs = output_body.Refs(**given, **scratch)
            output_body.Block(passing.cut, all_refs, makers, handover.wait).run()

        # One after another in the text, so that both have the same shared memory.
        of_makers = channel_body.scratch_types(q.dtype, interpret=interpret)
        pl.when(block < makers)(functools.partial(_scoped, make, of_makers))
        of_takers = output_body.scratch_types(passing.cut)
        pl.when(block >= makers)(functools.partial(_scoped, take, of_takers))

    out = launch(
        body,
        name="kda_prefill",
        grid={"block": makers + passing.cut.blocks},
        inputs={"counts_ref": counts, **tokens, **of_pass},
        outputs={
            **passing.outputs,
            **{taken: making.outputs[name] for name, taken in made.items()},
        },
        warpgroups=max(channel_body.WARPGROUPS, halves + 1),
        compiler_params=compiler_params(),
        interpret=interpret,
    )
    return passing.results(out)


def _scoped(run: Any, types: dict[str, Any]) -> None:
    """`run` with scratch of its own."""
    used = {name: each for name, each in types.items() if each is not None}
    absent = dict.fromkeys(types.keys() - used.keys())
    pl.run_scoped(lambda **refs: run(**refs, **absent), **used, collective_axes="wg")
