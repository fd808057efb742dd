"""The rotation of queries by the producer warpgroup, which stores them to shared memory as e4m3
terms.

Half a warp has a packed row, and lane l of it dims 4 l to 4 l + 3 of every 64, as in the layout
`SCORES`. The rotation is a butterfly: stages inside of a thread, and four between lanes. Rotated
queries exist nowhere else.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.turboquant.codec import TurboFormat, butterfly
from jaxattn.kernels.attention.packed_row_layouts import SCORES
from jaxattn.kernels.gqa.decode.fp8_register_operands import divided_queries
from jaxattn.kernels.gqa.decode.load.query_gather import QueryGather
from jaxattn.kernels.hopper.mlir import arith, utils
from jaxattn.kernels.hopper.ptx import (
    element,
    f32,
    fragmented,
    i32,
    joined,
    word,
)
from jaxattn.kernels.turboquant.fp8_split import TERM_EXPONENT, store_terms

LANES = 16  # lanes that share a row
OF_THREAD = 4  # neighboring dims of a thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotatedQueryGather(QueryGather):
    """The gather of queries, with their rotation.

    Attributes:
        memory: The shared memory: `queries`, which receive both terms, their barriers, and
            `factors`.
        form: The cache's format.
    """

    form: TurboFormat

    def _store(self, numbers: jax.Array, row_slice: Any, pair: jax.Array, slot: jax.Array) -> None:
        x = numbers.astype(jnp.float32)
        # e4m3 has no infinity, which would become 448.
        x = jnp.where((x == jnp.inf) | (x == -jnp.inf), jnp.nan, x)
        share = 1.0
        if self.form.rotated:
            x, share = self._apply_hadamard(x), self.form.head_dim**-0.5

        def wide(vector: jax.Array) -> jax.Array:
            return plgpu.layout_cast(lax.broadcast_in_dim(vector, x.shape, [0]), SCORES)

        divided, factors = divided_queries(x, wide, TERM_EXPONENT)
        queries, columns = self.memory.queries.at[slot], self.rows.columns
        second = pl.ds(columns + row_slice.start, row_slice.size)
        store_terms(
            (queries.at[row_slice], queries.at[second]), divided, interpret=self.rows.interpret
        )
        self.memory.factors[slot, row_slice] = factors * (share * self.scale)

    def _apply_hadamard(self, x: jax.Array) -> jax.Array:
        """Returns [n, D] times the Hadamard matrix times D**0.5."""
        if not self.rows.interpret:
            out = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, SCORES)
            run = plgpu.inline_mgpu(arg_types=(SCORES,), return_type=out)
            return run(lambda ctx, x: self._butterflies(x))(x)
        return butterfly(x)

    def _butterflies(self, x: Any) -> Any:
        of_row = self.form.head_dim // (LANES * OF_THREAD)
        registers = list(x.registers.flat)
        turned = []
        for first in range(0, len(registers), of_row):
            some = registers[first : first + of_row]
            numbers = lane_butterfly([element(four, i) for four in some for i in range(OF_THREAD)])
            turned += [
                joined(numbers[i : i + OF_THREAD]) for i in range(0, len(numbers), OF_THREAD)
            ]
        return fragmented(turned, x.shape, x.layout)


def lane_butterfly(x: list[Any], lanes: int = LANES) -> list[Any]:
    """Returns a thread's numbers after the butterfly. `lanes` lanes share a row; x has the thread's
    numbers of all its dims in order."""
    distance = 1
    while distance < len(x):
        x = [
            arith.subf(x[i - distance], one) if i & distance else arith.addf(one, x[i + distance])
            for i, one in enumerate(x)
        ]
        distance *= 2
    lane = arith.andi(utils.thread_idx(), word(lanes - 1))
    for stage in range(lanes.bit_length() - 1):
        # The lane whose bit is set gets the difference: the other's number less its own.
        upper = arith.andi(lane, word(1 << stage))
        sign = arith.shli(upper, word(31 - stage))
        x = [arith.addf(utils.shfl_bfly(one, 1 << stage), _signed(one, sign)) for one in x]
    return x


def _signed(x: Any, sign: Any) -> Any:
    """Returns the number, negated if the word's highest bit is set."""
    return arith.bitcast(f32(), arith.xori(arith.bitcast(i32(), x), sign))
