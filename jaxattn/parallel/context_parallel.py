"""Attention over pages that are distributed over GPUs: page p of a row is on GPU p mod N.

The scheduler assigns pages in stripes of one page on each of the N GPUs, with the same number on
all. So a block table lists stripes, and serves as each GPU's own table without a change:

    places of a row      0  1  2  3  4  5      N = 2
    stripe               7  7  3  3  9  9      block_tables [7, 3, 9]
    GPU                  0  1  0  1  0  1

From a row's length, each GPU computes the number of tokens in its own pages. It attends with the
heads of all N GPUs over its own pages. Each head's partial results are then merged on the GPU that
owns the head.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.core.cache.symmetric_buffer import SymmetricBuffer
from jaxattn.core.dispatch import Implementation
from jaxattn.core.layer_index import split_layer_index
from jaxattn.core.validation.array_checks import BoundedLengths
from jaxattn.kernels.collectives.peer_exchange import supports_exchange
from jaxattn.kernels.mla.decode.arguments import ContextParallelMerge
from jaxattn.ops.collectives.peer_exchange import peer_exchange
from jaxattn.ops.mla.merge_buffer import padded_heads
from jaxattn.ops.mla.state_merge import merge_attention_states
from jaxattn.parallel.layout import Parallel

type Attend = Callable[..., tuple[Array, Any, list[Array]]]


WIDEST = 4608  # the most numbers of a piece that a warpgroup sends: eight heads of 576
PIECE_MULTIPLE = 512  # the numbers of a piece are a multiple of this


def pieces_of(heads: int, given: int, output: int) -> tuple[int, int] | None:
    """Returns (the pieces per row, the numbers of the widest piece); None if no kernel fits.

    Args:
        heads: The number of heads of one GPU.
        given: The numbers per head that other GPUs attend with.
        output: The numbers per head that come back, in addition to a log-sum-exp.
    """
    for pieces in (n for n in range(1, heads + 1) if heads % n == 0):
        own = heads // pieces
        widths = own * given, -(-own * (output + 2) // PIECE_MULTIPLE) * PIECE_MULTIPLE
        if max(widths) <= WIDEST and all(supports_exchange(width, 2) for width in widths):
            return pieces, max(widths)
    return None


def gathered_in(numbers: int) -> tuple[int, int] | None:
    """Returns (pieces per row, numbers per piece) if the mailbox carries no results back.

    Each piece has a block, and is as small as a warpgroup's stores of 16 bytes allow. Returns None
    if no kernel fits.
    """
    width = next((n for n in (PIECE_MULTIPLE, PIECE_MULTIPLE // 2) if numbers % n == 0), 0)
    return (numbers // width, width) if width and supports_exchange(width, 2) else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContextParallelPages:
    """The pages of a batch as one of N GPUs sees them.

    Attributes:
        places: int32 [B, M * N], the page of each place of a row. It is -1 for the pages of other
            GPUs, so that nothing is written there.
        tables: int32 [B * S, M], this GPU's own pages of each new token's row.
        lens: int32 [B * S], the number of tokens in these pages that each new token attends to, at
            most the capacity of its table.
        axes: The mesh axes over which the pages are distributed.
        ways: N, the number of GPUs.
        most: The number of tokens for which a table has places.
        mailbox: The mailbox through which GPUs exchange rows; None uses XLA's collectives.
        pieces: The number of pieces in which a row is sent, see `pieces_of`.
        merge: A mailbox for the fused merge, in which the launch that merges a GPU's own partial
            results also exchanges them. None merges, sends through `mailbox`, and merges again.
        implementation: The implementation of `peer_exchange`.
    """

    places: Int[Array, "B MN"]
    tables: Int[Array, "rows M"]
    lens: Int[Array, "rows"]
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    ways: int = dataclasses.field(metadata={"static": True})
    most: int = dataclasses.field(metadata={"static": True})
    mailbox: SymmetricBuffer | None = None
    pieces: int = dataclasses.field(default=1, metadata={"static": True})
    merge: SymmetricBuffer | None = None
    implementation: Implementation | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    @classmethod
    def of(
        cls,
        parallel: Parallel,
        block_tables: Int[Array, "B M"],
        seq_lens: Int[Array, "B"],
        *,
        page_size: int,
        q_len: int,
    ) -> "ContextParallelPages | None":
        """Returns the pages of rows with `q_len` new tokens; None if each GPU has all pages.

        Args:
            block_tables: The stripes of each row, in order.
        """
        axes, ways = parallel.axes("context"), parallel.size("context")
        if not axes:
            return None
        gpu = lax.axis_index(axes)
        places = written_places(parallel, block_tables)
        # Each new token becomes a row of its own, which attends to the tokens up to itself.
        ends = seq_lens[:, None] - jnp.arange(q_len - 1, -1, -1)
        ends = jnp.where((seq_lens > 0)[:, None], jnp.maximum(ends, 0), 0).reshape(-1)
        tables = jnp.repeat(block_tables, q_len, axis=0)
        most = block_tables.shape[1] * page_size
        lens = jnp.minimum(own_lengths(ends, gpu, ways, page_size), most)
        return cls(places, tables, lens, axes, ways, most)

    def exchanging(self, mailbox: SymmetricBuffer, **options: Any) -> "ContextParallelPages":
        """Returns the same pages, for GPUs that exchange rows through a mailbox."""
        return dataclasses.replace(self, mailbox=mailbox, **options)

    def attend(
        self, heads: list[Float[Array, "B S h D"]], attend: Attend
    ) -> tuple[Float[Array, "B S h R"], list[Array], list[SymmetricBuffer]]:
        """Computes the attention of this GPU's heads over the pages of all GPUs.

        Args:
            heads: The inputs of each of the GPU's h heads: queries, and gates if there are any.
            attend: The attention over this GPU's pages: (the inputs of all N x h heads
                [B * S, 1, N h, D], tables, lens) -> (out [B * S, 1, N h, R], lse [B * S, 1, N h],
                further results). With the fused merge it also gets `merge`, and returns (out
                [B * S, 1, h, R] of this GPU's heads, the mailbox after it, further results).

        Returns:
            (the output in `attend`'s dtype, 0 for padding; the further results; the mailboxes
            `mailbox` and `merge`, if they exist).
        """
        widths = [x.shape[-1] for x in heads]
        batch, q_len, num_heads, _ = heads[0].shape
        together = jnp.concatenate(heads, axis=-1).reshape(batch * q_len, 1, num_heads, -1)
        with jax.named_scope("context_gather"):
            together, mailbox = self._gathered(together)
        parts = jnp.split(together, _ends(widths), axis=-1)
        where = self.tables, BoundedLengths(self.lens, self.most)
        if self.merge is not None:
            merge = ContextParallelMerge(self.merge, self.axes, self.ways * num_heads)
            out, after, extras = attend(parts, *where, merge=merge)
            boxes = [mailbox or self.mailbox, after]
            shape = batch, q_len, num_heads, out.shape[-1]
            return out.reshape(shape), extras, [each for each in boxes if each is not None]
        out, lse, extras = attend(parts, *where)
        with jax.named_scope("context_merge"):
            shape = batch, q_len, num_heads, out.shape[-1]
            if mailbox is None or out.dtype.itemsize != 2:
                sent = _pack_out_lse(out, lse).reshape(batch, q_len, self.ways, num_heads, -1)
                met = lax.all_to_all(sent, self.axes, split_axis=2, concat_axis=0)
                met = met.reshape(self.ways, *shape[:3], -1)
            else:
                met, mailbox = self._exchanged(_pack_out_lse(out, lse), mailbox)
            merged, _ = merge_attention_states(*_unpack_out_lse(met, out.dtype))
        merged = merged.astype(out.dtype).reshape(shape)
        given = [each for each in (mailbox or self.mailbox,) if each is not None]
        return merged, extras, given

    def row_positions(self, local_positions: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """Returns the positions in their row of tokens in this GPU's pages; -1 stays -1."""
        page = self.most // self.tables.shape[1]
        stripe, gpu = local_positions // page * self.ways, lax.axis_index(self.axes)
        return jnp.where(local_positions < 0, -1, (stripe + gpu) * page + local_positions % page)

    def own_positions(self, positions: Int[Array, "B S K"]) -> Int[Array, "rows 1 K"]:
        """The inverse, for rows of one new token; -1 for a token in another GPU's pages."""
        page = self.most // self.tables.shape[1]
        column = positions // page
        there = (positions >= 0) & (column % self.ways == lax.axis_index(self.axes))
        own = jnp.where(there, column // self.ways * page + positions % page, -1)
        return own.reshape(-1, 1, positions.shape[-1])

    def _gathered(self, x: Float[Array, "T 1 h D"]) -> tuple[Array, SymmetricBuffer | None]:
        """Returns ([T, 1, N h, D] of all GPUs, the mailbox afterwards, or None if XLA gathered).
        With the fused merge, zeros pad the heads to the number that the decode launch takes."""
        rows, _, own, width = x.shape
        if self.mailbox is None or not self._room(rows) or x.dtype.itemsize != 2:
            return lax.all_gather(x, self.axes, axis=2, tiled=True), None
        more = 0 if self.merge is None else padded_heads(self.ways * own) - self.ways * own
        room = more // own if more % own == 0 else 0
        met, mailbox = self._sent(x.reshape(rows, 1, self.pieces, -1), self.mailbox, room)
        return met.reshape(rows, 1, (self.ways + room) * own, width), mailbox

    def _exchanged(self, x: Array, mailbox: SymmetricBuffer) -> tuple[Array, SymmetricBuffer]:
        """Returns all GPUs' results for this GPU's heads, [N, T, pieces, h / pieces, W].

        Args:
            x: uint16 [T, 1, N h, W], the results for all heads.
        """
        rows, _, heads, width = x.shape
        own = heads // self.ways // self.pieces
        x = x.reshape(rows, self.ways, self.pieces, own * width)
        x = jnp.pad(x, ((0, 0),) * 3 + ((0, -own * width % PIECE_MULTIPLE),))
        met, mailbox = self._sent(lax.bitcast_convert_type(x, jnp.bfloat16), mailbox)
        met = lax.bitcast_convert_type(met[..., : own * width], jnp.uint16)
        return jnp.moveaxis(met, 1, 0).reshape(self.ways, rows, self.pieces, own, width), mailbox

    def _sent(
        self, part: Array, mailbox: SymmetricBuffer, room: int = 0
    ) -> tuple[Array, SymmetricBuffer]:
        options: Any = dict(axes=self.axes, implementation=self.implementation)
        return peer_exchange(part, mailbox, room=room, **options)

    def _room(self, rows: int) -> bool:
        return self.mailbox is not None and rows * self.pieces <= self.mailbox.inbox.shape[2]


def _pack_out_lse(out: Float[Array, "*h R"], lse: Float[Array, "*h"]) -> Array:
    """Joins both in one array [*h, R + 1]; with 16 bits [*h, R + 2], ending in a split float32."""
    if out.dtype.itemsize != 2:
        wide = jnp.promote_types(out.dtype, jnp.float32)
        return jnp.concatenate([out.astype(wide), lse.astype(wide)[..., None]], axis=-1)
    bits = (lax.bitcast_convert_type(x, jnp.uint16) for x in (out, lse.astype(jnp.float32)))
    return jnp.concatenate([*bits], axis=-1)


def _unpack_out_lse(packed: Array, dtype: Any) -> tuple[Float[Array, "*h R"], Float[Array, "*h"]]:
    """The inverse of `_pack_out_lse`, in float32 or wider."""
    if packed.dtype != jnp.uint16:
        return packed[..., :-1], packed[..., -1]
    out = lax.bitcast_convert_type(packed[..., :-2], dtype)
    return out.astype(jnp.float32), lax.bitcast_convert_type(packed[..., -2:], jnp.float32)


def own_lengths(
    lens: Int[Array, "*B"], gpu: Int[Array, ""] | int, num_gpus: int, page_size: int
) -> Int[Array, "*B"]:
    """Returns how many of a row's first tokens lie in the pages of GPU `gpu` of `num_gpus`."""
    stripe = num_gpus * page_size
    return lens // stripe * page_size + jnp.clip(lens % stripe - gpu * page_size, 0, page_size)


def written_places(parallel: Parallel, block_tables: Int[Array, "B M"]) -> Int[Array, "B MN"]:
    """Returns the page of each place of a row. It is -1 for the pages of other GPUs, so that
    nothing is written there."""
    axes, ways = parallel.axes("context"), parallel.size("context")
    if not axes:
        return block_tables
    own = jnp.arange(ways * block_tables.shape[1]) % ways == lax.axis_index(axes)
    return jnp.where(own, jnp.repeat(block_tables, ways, axis=1), -1)


def prefix_of(
    parallel: Parallel, kv_cache: Array, block_tables: Int[Array, "B M"], layer: Any
) -> tuple[Array, Int[Array, "B MN"], Any]:
    """Gathers a cache in which each row's pages lie in order, for a prompt to read.

    Args:
        kv_cache: This GPU's own cache, [L, pages, ...] with `layer`, or [pages, ...].

    Returns:
        (pages [B * M * N, ...] of the layer, the tables of all places, None as layer). If each GPU
        has all pages, the arguments are returned.
    """
    axes, num_gpus = parallel.axes("context"), parallel.size("context")
    if not axes:
        return kv_cache, block_tables, layer
    batch, width = block_tables.shape
    index = (block_tables,) if layer is None else (split_layer_index(layer)[2], block_tables)
    with jax.named_scope("context_prefix"):
        # Entries after a row's last page may be invalid; no op uses the pages that they read.
        own = kv_cache.at[index].get(mode="clip")
        met = jnp.moveaxis(lax.all_gather(own, axes), 0, 2)
        pages = met.reshape(batch * width * num_gpus, *own.shape[2:])
    tables = jnp.arange(batch * width * num_gpus, dtype=jnp.int32).reshape(batch, -1)
    return pages, tables, None


def own_of_shared(x: Float[Array, "*shape Hk D"], parallel: Parallel) -> Float[Array, "*shape h D"]:
    """Selects this GPU's key-value heads, of those that the GPUs of a row's pages share."""
    axes, ways = parallel.axes("context"), parallel.size("context")
    if not axes:
        return x
    heads = x.shape[-2]
    own = max(heads // ways, 1)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * heads // ways, own, axis=-2)


def _ends(widths: list[int]) -> list[int]:
    ends: list[int] = []
    for width in widths[:-1]:
        ends.append(width + (ends[-1] if ends else 0))
    return ends
