"""Tile configurations of `grouped_product` with 4-bit weights.

Widening takes as long as reading, so at least two warpgroups work on a multiprocessor: one has
gate's rows and another up's, or each has rows of its own.
"""

import dataclasses
import math

import jax

from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.kernels.hopper.device import NUM_SMS, RESERVED_BYTES, SHARED_BYTES
from jaxattn.kernels.hopper.four_bit_dequantization import LINE
from jaxattn.kernels.hopper.four_bit_mainloop import lines_of_step
from jaxattn.kernels.moe.tile_config import (
    BARRIER_BYTES,
    BLOCK,
    GROUP,
    MOST_STAGES,
    ROWS,
    TOKEN_TILES,
    GemmTileConfig,
    MoeTileConfig,
    token_tile,
)

FEW_COLUMNS = 32  # of tokens, with which two CTAs have registers enough
DEPTHS = (BLOCK, 3 * ROWS, ROWS)  # numbers of K of a step, the first that divides K
DEEP = (2 * BLOCK, 5 * ROWS)  # tried before these for one token: its warps wait for each step


def lines(weights: jax.Array) -> jax.Array:
    """Returns tiles [L, E, ..., K / C, bytes] as [L, E, R / 64, lines, 128], the form in which they
    are copied."""
    layers, experts, *down, across, size = weights.shape
    return weights.reshape(layers, experts, math.prod(down), across * size // LINE, LINE)


def choose_four_bit(
    form: FourBitFormat,
    *,
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    expert_size: int,
) -> MoeTileConfig:
    """Returns the tile configuration for these sizes.

    With few tokens two CTAs share a multiprocessor, and each has two consumer warpgroups.
    """
    pairs = tokens * top_k
    used = min(experts, pairs)
    columns = token_tile(pairs, experts, tokens, TOKEN_TILES[-1])

    def product(rows: int, depth: int, gated: bool) -> GemmTileConfig:
        depths = DEEP + DEPTHS if tokens == 1 else DEPTHS
        step = next(n for n in depths if depth % n == 0 and n % form.columns == 0)
        wide = rows % (2 * ROWS) == 0 and used * (rows // (2 * ROWS)) >= 2 * NUM_SMS
        together = 2 if columns <= FEW_COLUMNS and not (wide and gated) else 1
        made = GemmTileConfig(
            consumers=2 if wide else 1, parts=2 if gated else 1, split=gated and not wide,
            depth=step, together=together, narrow=columns == 2 * GROUP,
        )  # fmt: skip
        items = used * (rows // made.rows)
        blocks = min(max(items, NUM_SMS), together * NUM_SMS)
        made = dataclasses.replace(made, blocks=blocks, together=-(-blocks // NUM_SMS))
        return dataclasses.replace(made, stages=_stages(made, form, columns, 2 if gated else 4))

    return MoeTileConfig(
        columns=columns,
        gate_up=product(expert_size, hidden, True),
        down=product(hidden, expert_size, False),
    )


def _stages(config: GemmTileConfig, form: FourBitFormat, columns: int, of_result: int) -> int:
    """Returns all stages that fit in shared memory."""
    weights = config.parts * config.consumers * lines_of_step(form, config.depth) * LINE
    stage = -(-weights // 1024) * 1024 + columns * config.depth * 2
    results = config.rows * columns * (of_result + 4 * config.split)
    room = SHARED_BYTES // config.together - RESERVED_BYTES - BARRIER_BYTES - results
    return max(2, min(MOST_STAGES, room // stage))
