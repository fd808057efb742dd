"""The arguments of a call of `gqa_decode`, after the op has checked them."""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from jaxattn.arena import Arena
from jaxattn.core.dispatch import without_gradient
from jaxattn.kernels.attention.split_kv_schedule import Schedule
from jaxattn.kernels.gqa.decode.smem import block_columns
from jaxattn.kernels.gqa.decode.split_kv.decode_schedule import (
    PairSchedule,
    compute_max_steps,
    decode_schedule,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GqaDecodeCall:
    """The arguments of one call; `jaxattn.gqa.gqa_decode` documents them.

    The kernels see heads as pairs (row, KV head), whose packed rows are s * group + j.

    Attributes:
        layer: int32 [1] after `stacked` has been called.
        kv_scale: float32 [2, Hk] for a float8_e4m3fn cache, else None.
    """

    op: ClassVar[str] = "gqa_decode"

    q: jax.Array
    kv_cache: jax.Array
    block_tables: jax.Array
    seq_lens: jax.Array
    query_lens: jax.Array | None = None
    layer: jax.Array | int | None = None
    sinks: jax.Array | None = None
    gate: jax.Array | None = None
    kv_scale: jax.Array | None = None
    schedule: PairSchedule | None = None
    arena: Arena | None = None
    scale: float = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def q_len(self) -> int:
        return self.q.shape[1]

    @property
    def num_heads(self) -> int:
        return self.q.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def kv_heads(self) -> int:
        return self.kv_cache.shape[-2]

    @property
    def page_size(self) -> int:
        return self.kv_cache.shape[-3]

    @property
    def max_pages(self) -> int:
        return self.block_tables.shape[1]

    @property
    def group(self) -> int:
        return self.num_heads // self.kv_heads

    @property
    def pairs(self) -> int:
        return self.batch * self.kv_heads

    @property
    def columns(self) -> int:
        """The packed rows of a CTA."""
        return block_columns(self.q_len * self.group, self.head_dim)[0]

    @property
    def tiles(self) -> int:
        """The number of CTAs that share a pair's rows."""
        return block_columns(self.q_len * self.group, self.head_dim)[1]

    @property
    def rows(self) -> int:
        """The packed rows that are kept per pair, in whole CTAs."""
        return self.columns * self.tiles

    def check_schedule(self) -> None:
        """Raises an error unless the schedule is None or was made for such rows, whichever
        implementation runs.

        Raises:
            TypeError: It is not a schedule.
            ValueError: It was made for other rows, or for another window.
        """
        if not isinstance(self.schedule, PairSchedule | None):
            raise TypeError(
                f"{self.op}: schedule must be a result of gqa.decode_schedule, got "
                f"{type(self.schedule).__name__}"
            )
        if self.schedule is not None:
            self.schedule.check(
                self.op, batch=self.batch, q_len=self.q_len, num_kv_heads=self.kv_heads,
                window=self.window,
                steps=compute_max_steps(self.max_pages, self.page_size, self.q_len, self.window),
            )  # fmt: skip

    def scheduled(self, *, interpret: bool) -> Self:
        """Returns the call with its schedule, or with one made from its own lengths.

        Raises:
            ValueError: The schedule was made for other rows.
        """
        if self.schedule is not None:
            self.check_schedule()
            return self
        schedule = decode_schedule(
            self.seq_lens, q_len=self.q_len, num_heads=self.num_heads, num_kv_heads=self.kv_heads,
            head_dim=self.head_dim, max_pages=self.max_pages, page_size=self.page_size,
            window=self.window, interpret=interpret,
        )  # fmt: skip
        return dataclasses.replace(self, schedule=dataclasses.replace(schedule, seq_lens=None))

    def stacked(self) -> Self:
        """Returns the same call on a stack of layers; none of its operands has a gradient."""
        q, kv_cache, kv_scale, sinks, gate = without_gradient(
            self.op,
            (self.q, self.kv_cache, self.kv_scale, self.sinks, self.gate),
            "q kv_cache kv_scale sinks gate",
            train_with="gqa_attention",
        )
        layer = self.layer
        if layer is None:
            kv_cache, layer = kv_cache[None], 0
        layer = jnp.asarray(layer, jnp.int32).reshape(1)
        return dataclasses.replace(
            self, q=q, kv_cache=kv_cache, kv_scale=kv_scale, layer=layer, sinks=sinks, gate=gate
        )

    def flat(self, x: jax.Array | None) -> jax.Array | None:
        """Returns [B, S, H, D] as [B * S * H, D]; None stays None."""
        return None if x is None else x.reshape(-1, self.head_dim)

    def inputs(self, line: Schedule) -> dict[str, Any]:
        """The inputs of a launch over the parts of `line`, except the queries and the cache."""
        assert self.schedule is not None
        return {
            "layer_ref": self.layer,
            "table_ref": self.block_tables,
            "lens_ref": self.seq_lens,
            "scheduled_lens_ref": self.schedule.seq_lens,
            "cuts_ref": line.cuts,
            "order_ref": line.order,
            "query_lens_ref": self.query_lens,
            "sinks_ref": self.sinks,
            "gate_ref": self.flat(self.gate),
            "kv_scale_ref": self.kv_scale,
        }
