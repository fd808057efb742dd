"""The steps of `attention_backward` in the Pallas interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.backward.mainloop import BackwardConsumer, KeyTileGrads
from jaxattn.kernels.attention.backward.tile_config import ROWS
from jaxattn.kernels.attention.backward.tile_scheduler import KeyTile


class InterpretedBackwardConsumer(BackwardConsumer):
    """A consumer without what the interpreter of JAX 0.11.2 lacks: wgmma with register operands,
    and accumulators that continue."""

    def begin(self, number: jax.Array) -> Any:
        del number

    def step(
        self, tile: KeyTile, done: jax.Array, i: jax.Array, carry: tuple[KeyTileGrads, Any]
    ) -> tuple[KeyTileGrads, Any]:
        memory, config, (grads, _) = self.memory, self.config, carry
        number = done + i
        slot, outputs = self.slot(number), self.output_slot(number)
        _, m = self.tiles.step(tile, i)
        plgpu.barrier_wait(memory.queries_loaded.at[slot])
        plgpu.barrier_wait(memory.outputs_loaded.at[outputs])

        def product(multiply: Any) -> jax.Array:
            def run(acc: Any) -> jax.Array:
                multiply(acc, number)
                return plgpu.wgmma_accumulator_load(acc)

            return pl.run_scoped(run, plgpu.ACC((ROWS, config.queries), jnp.float32))

        def added(before: Any, left: jax.Array, right: Any, dims: int) -> tuple[jax.Array, ...]:
            left = left.astype(jnp.float32)
            of_each = (right.at[piece][...].astype(jnp.float32) for piece in self.own(dims))
            return tuple(x + jnp.dot(left, y) for x, y in zip(before, of_each, strict=True))

        p, slope = self.weights(product(self.multiply_keys), tile, m, slot)
        products = product(self.multiply_values) + self.begin_values(slot)
        ds = self.gradient(p, slope, products)
        dv = added(grads.values, p, memory.outputs.at[outputs], config.values)
        self.write_scores(ds, i)
        dk = added(grads.keys, ds, memory.queries.at[slot], config.dims)
        plgpu.commit_smem()  # plain loads, unlike wgmma, must end before TMA overwrites
        plgpu.barrier_arrive(memory.outputs_read.at[outputs])
        plgpu.barrier_arrive(memory.queries_read.at[slot])
        plgpu.barrier_wait(memory.scores_written.at[0])
        first, *others = self.query_gradient.parts(i)
        dq = self.query_gradient.product(number, first[0])
        self.query_gradient.await_room(number)
        self.query_gradient.add(first[0], dq)
        if not others:
            plgpu.barrier_arrive(memory.scores_read.at[0])
        self.query_gradient.add_others(number, i)
        return KeyTileGrads(dk, dv), None
