"""The steps of `attention_backward` for heads whose accumulators leave few registers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.backward.mainloop import TILE, BackwardConsumer, KeyTileGrads
from jaxattn.kernels.attention.backward.query_gradient import again
from jaxattn.kernels.attention.backward.tile_scheduler import KeyTile
from jaxattn.kernels.hopper.instructions import fence_proxy_async, warpgroup_barrier


class WideBackwardConsumer(BackwardConsumer):
    """A consumer whose accumulators leave registers for only one product of scores.

    A step begins with its own scores. During its exponentials the tensor cores add the last step's
    part of dK, whose dS they read from shared memory.
    """

    def begin(self, number: jax.Array) -> Any:
        """Writes zeros to the buffer of dS: the first step adds them to dK."""
        del number
        mine = self.memory.scores.at[0, self.rows]
        mine[...] = plgpu.layout_cast(jnp.zeros(mine.shape, self.dtype), TILE)
        fence_proxy_async(interpret=False)
        warpgroup_barrier(interpret=False)

    def add_keys(self, accs: Any, before: Any, number: jax.Array) -> int:
        """Adds a step's part of dK, with dS read from shared memory."""
        scores = self.memory.scores.at[again(number), self.rows]
        queries = self.memory.queries.at[self.slot(number)]
        return self.add(accs, before, scores, queries, self.config.dims)

    def end(self, number: jax.Array, grads: KeyTileGrads) -> KeyTileGrads:
        def product(accs: Any) -> Any:
            self.add_keys(accs, grads.keys, number)
            return tuple(plgpu.wgmma_accumulator_load(acc) for acc in accs)

        keys = pl.run_scoped(product, self.scopes()[3])
        plgpu.barrier_arrive(self.memory.queries_read.at[self.slot(number)])
        return grads._replace(keys=keys)

    def step(
        self, tile: KeyTile, done: jax.Array, i: jax.Array, carry: tuple[KeyTileGrads, Any]
    ) -> tuple[KeyTileGrads, Any]:
        memory, config, (grads, _) = self.memory, self.config, carry
        number = done + i
        # The first step has no step before it: it multiplies zeros by any queries.
        before = jnp.where(i == 0, number, number - 1)
        slot, outputs = self.slot(number), self.output_slot(number)
        _, m = self.tiles.step(tile, i)
        first, *others = self.query_gradient.parts(i)

        def products(dp_acc: Any, s_acc: Any, dv_accs: Any, dk_accs: Any, dq_acc: Any) -> Any:
            plgpu.barrier_wait(memory.queries_loaded.at[slot])
            self.multiply_keys(s_acc, number)
            count = self.add_keys(dk_accs, grads.keys, before)
            scores = plgpu.wgmma_accumulator_load(s_acc, wait_n=count)
            p, slope = self.weights(scores, tile, m, slot)
            plgpu.barrier_wait(memory.outputs_loaded.at[outputs])
            dp_acc[...] = self.begin_values(slot)
            more = self.multiply_values(dp_acc, number)
            count = self.add(dv_accs, grads.values, p, memory.outputs.at[outputs], config.values)
            dk = tuple(plgpu.wgmma_accumulator_load(acc, wait_n=count + more) for acc in dk_accs)
            read = memory.queries_read.at[self.slot(before)]
            pl.when(i > 0)(lambda: plgpu.barrier_arrive(read))
            ds = self.gradient(p, slope, plgpu.wgmma_accumulator_load(dp_acc, wait_n=count))
            warpgroup_barrier(interpret=False)  # all warps' products have read the last dS
            self.write_scores(ds, i)
            plgpu.barrier_wait(memory.scores_written.at[0])
            self.query_gradient.multiply(dq_acc, number, first[0])
            dv = tuple(plgpu.wgmma_accumulator_load(acc, wait_n=1) for acc in dv_accs)
            plgpu.barrier_arrive(memory.outputs_read.at[outputs])
            dq = plgpu.wgmma_accumulator_load(dq_acc)
            if not others:
                plgpu.barrier_arrive(memory.scores_read.at[0])
            self.query_gradient.await_room(number)
            self.query_gradient.add(first[0], dq)
            return KeyTileGrads(dk, dv), None

        carry = pl.run_scoped(products, *self.scopes())
        self.query_gradient.add_others(number, i)
        return carry
