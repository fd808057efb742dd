"""A CTA of `attention_backward`: two consumer warpgroups, and a producer that loads and stores."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.backward.interpreter import InterpretedBackwardConsumer
from jaxattn.kernels.attention.backward.mainloop import BackwardConsumer, KeyTileOutputs
from jaxattn.kernels.attention.backward.producer import BackwardProducer, BackwardSources
from jaxattn.kernels.attention.backward.query_gradient import QueryGradient, QueryGradientStorer
from jaxattn.kernels.attention.backward.score_gradient import ScoreGradient
from jaxattn.kernels.attention.backward.smem import BackwardSmem
from jaxattn.kernels.attention.backward.tile_config import WARPGROUPS, BackwardTileConfig
from jaxattn.kernels.attention.backward.tile_scheduler import BackwardTileScheduler
from jaxattn.kernels.attention.backward.wide_head_mainloop import WideBackwardConsumer
from jaxattn.kernels.attention.work_queue import WorkQueue


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardCta:
    """The warp-specialized body of one CTA.

    Attributes:
        blocks, items: The number of resident CTAs, and of key tiles in all.
    """

    config: BackwardTileConfig
    tiles: BackwardTileScheduler
    scores: ScoreGradient
    dtype: Any
    blocks: int
    items: int
    interpret: bool

    def run(self, **refs: Any) -> None:
        """Runs the CTA; `refs` are the refs of the operands, of the outputs, and of
        `BackwardSmem`."""
        config, wg = self.config, lax.axis_index("wg")
        memory = BackwardSmem(**{name: refs.pop(name) for name in BackwardSmem._fields})
        outputs = KeyTileOutputs(**{name: refs.pop(name) for name in ("dk", "dk_rest", "dv")})
        dq, turns = refs.pop("dq"), refs.pop("turns")
        ranges, drawn, first = (refs.pop(name) for name in ("ranges", "drawn", "first"))
        each = functools.partial(self.each_tile, ranges, drawn, memory)

        @pl.when(wg < WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(config.compute_registers, action="increase")
            kind = BackwardConsumer if config.ahead else WideBackwardConsumer
            kind = InterpretedBackwardConsumer if self.interpret else kind
            # Each warpgroup gets its own code: shared-memory addresses that depended on the
            # warpgroup would take the registers of the accumulators.
            for number in range(WARPGROUPS):
                query_gradient = QueryGradient(
                    config=config, memory=memory, wg=number, interpret=self.interpret
                )
                consumer = kind(
                    config=config, tiles=self.tiles, memory=memory, scores=self.scores,
                    dtype=self.dtype, wg=number, first_keys=first, outputs=outputs,
                    query_gradient=query_gradient, interpret=self.interpret,
                )  # fmt: skip

                @pl.when(wg == number)
                def _(consumer: BackwardConsumer = consumer) -> None:
                    done = each(False, consumer.tile, jnp.int32(0))
                    # A thread that waits on a barrier must observe each of its completions.
                    consumer.query_gradient.await_room(done)
                    plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == WARPGROUPS)
        def _load() -> None:
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            storer = QueryGradientStorer(
                config=config, tiles=self.tiles, memory=memory, dq=dq, turns=turns,
                from_zero=first is None, interpret=self.interpret,
            )  # fmt: skip
            producer = BackwardProducer(
                config=config, tiles=self.tiles, sources=BackwardSources(**refs), memory=memory,
                storer=storer,
            )  # fmt: skip
            producer.drain(each(True, producer.tile, (jnp.int32(0), jnp.int32(0))))

    def each_tile(
        self, ranges: Any, drawn: Any, memory: BackwardSmem, draws: bool, do: Any, carry: Any
    ) -> Any:
        """Runs carry = do(tile, carry) for each tile of the CTA; one warpgroup draws the tiles."""
        block = lax.axis_index("block")
        run = lambda item, carry: do(self.tiles.at(item, ranges), carry)  # noqa: E731
        if self.items == self.blocks:
            return run(block, carry)
        turns = WorkQueue(
            drawn, memory.queue, block, blocks=self.blocks, items=self.items, in_order=True,
            interpret=self.interpret,
        )  # fmt: skip
        return turns.each(draws, run, carry)
