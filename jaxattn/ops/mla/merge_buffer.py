"""The mailbox's shape and the padded heads for the merge of MLA decode's outputs over GPUs."""

from jaxattn.kernels.attention.split_kv_schedule import (
    TILE,
    few_rows,
    may_split,
    num_parts,
    num_steps,
    num_tiles,
)
from jaxattn.kernels.hopper.device import NUM_SMS
from jaxattn.kernels.mla.decode.combine import SHARED_ROWS
from jaxattn.kernels.mla.decode.distributed_combine import mailbox_shape


def merge_buffer_shape(
    rows: int, num_heads: int, *, max_pages: int, page_size: int
) -> tuple[int, int] | None:
    """Returns (tokens, features) of the mailbox through which one launch merges the GPUs' outputs.

    Returns None if there are too many rows, or if no row is ever split: the outputs are then sent
    after the combine.

    Args:
        rows: Number of rows, of one token each.
        num_heads: Number of heads of all GPUs together.
        max_pages, page_size: Those of one GPU's block table.
    """
    parts = num_parts(rows, 1, num_heads, num_steps(max_pages, page_size), NUM_SMS)
    if rows * num_heads > SHARED_ROWS or not may_split(rows, parts):
        return None
    return mailbox_shape(rows, num_heads)


def padded_heads(num_heads: int) -> int:
    """Returns the head count to which to zero-pad queries so that the kernel need not copy them."""
    return num_heads if few_rows(1, num_heads) else num_tiles(1, num_heads) * TILE


def max_mailbox_shape() -> tuple[int, int]:
    """Returns `merge_buffer_shape` for the largest number of rows."""
    return mailbox_shape(1, SHARED_ROWS)
