"""Gather of a pair's queries from the caller's array into shared memory.

It has two phases: the first issues loads, and the second waits for them. The first step's copies of
the cache start in between.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.packed_row_layouts import SCORES
from jaxattn.kernels.gqa.decode.fp8_register_operands import half_queries, in_order, order_of
from jaxattn.kernels.gqa.decode.load.packed_rows import PackedRows
from jaxattn.kernels.gqa.decode.smem import ACROSS
from jaxattn.kernels.gqa.decode.split_kv.work_iterator import HeadWorkIterator
from jaxattn.kernels.hopper.instructions import issue_loads

AT_A_TIME = 2048  # numbers that are gathered at a time, 16 per thread


class QueryLoaderProtocol(Protocol):
    def ask(self, pair: jax.Array) -> Any:
        """Issues the loads that `put` waits for."""
        ...

    def put(self, pending_queries: Any, pair: jax.Array, slot: jax.Array) -> None:
        """Stores a pair's queries in `slot`, and signals their arrival."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryGather:
    """The gather of queries.

    Attributes:
        q_ref: [B * S * H, D], of which `rows` are gathered.
        memory: The shared memory: `queries`, their barriers, and for an FP8 cache `factors`.
        scale: The scale of all scores.
        kv_scale_ref: float32 [2, Hk] for an FP8 cache, which takes float16 queries in the order of
            its keys, and a factor of each packed row's scores; None: queries as they are.
    """

    q_ref: Any
    rows: PackedRows
    part: HeadWorkIterator
    memory: Any
    scale: float
    kv_scale_ref: Any

    def ask(self, pair: jax.Array) -> jax.Array:
        _, first_rows = next(self._some())
        pending_queries = self._load(first_rows, pair)
        issue_loads(interpret=self.rows.interpret)
        return pending_queries

    def put(self, pending_queries: jax.Array, pair: jax.Array, slot: jax.Array) -> None:
        for start, rows in self._some():
            numbers = pending_queries if start == 0 else self._load(rows, pair)
            self._store(numbers, pl.ds(start, rows.columns), pair, slot)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.memory.queries_loaded.at[slot])

    def _some(self) -> Iterator[tuple[int, PackedRows]]:
        """Yields the packed rows in groups that are gathered at a time, with the index of the
        first."""
        rows, dim = self.rows, self.q_ref.shape[1]
        rows_per_load = max(AT_A_TIME // dim, ACROSS)
        for start in range(0, rows.columns, rows_per_load):
            columns = min(rows_per_load, rows.columns - start)
            yield (
                start,
                dataclasses.replace(rows, columns=columns, first_row=rows.first_row + start),
            )

    def _load(self, rows: PackedRows, pair: jax.Array) -> jax.Array:
        dim = self.q_ref.shape[1]
        order = None if self.kv_scale_ref is None else order_of(dim)
        base_row = rows.row_of(*self.part.row_and_head(pair))
        return rows.load(self.q_ref, base_row, 0, dim, order)

    def _store(self, numbers: jax.Array, row_slice: Any, pair: jax.Array, slot: jax.Array) -> None:
        destination = self.memory.queries.at[slot, row_slice]
        if self.kv_scale_ref is None:
            destination[...] = numbers
            return
        if self.rows.interpret:
            numbers = in_order(numbers)

        def wide(vector: jax.Array) -> jax.Array:
            return plgpu.layout_cast(lax.broadcast_in_dim(vector, numbers.shape, [0]), SCORES)

        destination[...], factors = half_queries(numbers.astype(jnp.float32), wide)
        head = self.part.row_and_head(pair)[1]
        self.memory.factors[slot, row_slice] = factors * (self.kv_scale_ref[0, head] * self.scale)
