"""Tile configurations of the grouped products, and the sizes that follow from them."""

import dataclasses
import math

import jax.numpy as jnp

from jaxattn.kernels.hopper.device import NUM_SMS, RESERVED_BYTES, SHARED_BYTES

ROWS = 64  # rows of weights of one wgmma
GROUP = 8  # tokens: an expert's begin at a multiple of it, and results are stored in such groups
BLOCK = 128  # rows and columns of FP8 weights that share a scale
TOKEN_TILES = (8, 16, 32, 64, 128)
ROUNDED = 1024  # tokens from which on the experts' outputs have 16 bits
NARROWEST = 32  # least columns for larger tiles, whose columns are multiples of it
FP8_COLUMNS = 64  # a warpgroup has registers for a product and a sum with so many, twice
BARRIER_BYTES = 2048  # left for barriers and alignment
MOST_STAGES = 12
FEW_MORE = NUM_SMS // 8  # items of gate and up that do not justify a second wave


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmTileConfig:
    """The tiling of one of the two grouped products.

    Attributes:
        consumers: Consumer warpgroups, each with its own rows of weights: 1 or 2.
        parts: Tiles of 64 rows of weights per consumer. Gate and up are one each.
        split: Whether gate and up have a warpgroup each, for FP8 and 4 bits with one consumer.
        depth: Numbers of K per stage: 64 or 128, with 4 bits up to 320.
        stages: Stages of the weights' ring; None: all that fit.
        blocks: Concurrent CTAs.
        together: CTAs per multiprocessor.
        narrow: Whether tiles of few tokens are multiplied with fewer columns; not for FP8 weights.
    """

    consumers: int = 1
    parts: int = 2
    split: bool = False
    depth: int = 128
    stages: int | None = None
    blocks: int = NUM_SMS
    together: int = 1
    narrow: bool = False

    @property
    def rows(self) -> int:
        """Rows of weights of an item, per part."""
        return self.consumers * ROWS

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply."""
        return self.parts if self.split else self.consumers


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeTileConfig:
    """The tiling of a mixture of experts.

    Attributes:
        columns: The most tokens of a tile, the N of wgmma.
        gate_up, down: The tilings of the two products.
        combine: Columns of the output that a CTA sums up.
        rounded: Whether the experts' outputs are rounded to the operands' dtype before they are
            summed up in float32.
    """

    columns: int
    gate_up: GemmTileConfig
    down: GemmTileConfig
    combine: int = 512
    rounded: bool = False


def token_tile(pairs: int, experts: int, tokens: int, max_tile: int = TOKEN_TILES[-1]) -> int:
    """Returns the tokens of a tile: a few more than most experts get.

    `pairs` (token, expert) are spread over the experts by chance. If experts have at most 8 tokens,
    one tile of 8 has them all. A larger tile than needed costs reads of tokens, which come from L2;
    a smaller one reads weights again, also from L2.
    """
    if tokens <= GROUP:
        return GROUP
    mean = pairs / experts
    min_tile = min(mean + 2.5 * math.sqrt(mean), max_tile)
    return next(tile for tile in TOKEN_TILES if tile >= min_tile)


def choose(
    *,
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    expert_size: int,
    quantized: bool = False,
) -> MoeTileConfig:
    """Returns the tile configuration for these sizes; `quantized`: whether the weights are FP8.

    Few items leave multiprocessors idle: an item then has 64 rows. With somewhat more items than
    multiprocessors, each multiprocessor runs two at a time, because a second wave would have few.
    Small items of 16-bit weights may be three at a time. For gate and up, whose items are long, an
    eighth more than multiprocessors does not justify a second wave. With many items two warpgroups
    share a read of tokens. Widening FP8 weights keeps one warpgroup busy, so there are two as soon
    as nearly every multiprocessor has an item of 128 rows. With fewer items one warpgroup has
    gate's rows, and another has up's.

    With many tokens the outputs are rounded: writing and reading them in float32 takes as long as
    an eighth of the products. Tiles of down are then multiplied with as few columns as they have
    tokens. Tiles of gate and up took longer that way: CTAs with narrow tiles run ahead of those
    that read the same weights.
    """
    pairs = tokens * top_k
    used = min(experts, pairs)
    columns = token_tile(pairs, experts, tokens, FP8_COLUMNS if quantized else TOKEN_TILES[-1])
    rounded = tokens >= ROUNDED

    def product(width: int, depth: int, parts: int) -> GemmTileConfig:
        wide = width % (2 * ROWS * parts) == 0
        items = used * (width // (2 * ROWS * parts))
        consumers = 2 if wide and items >= (0.9 if quantized else 2) * NUM_SMS else 1
        # Scales are of 128 of K. Otherwise small steps leave room for more stages.
        step = BLOCK if quantized or (consumers == 1 and depth % BLOCK == 0) else ROWS
        return GemmTileConfig(consumers=consumers, parts=parts, depth=step)

    def all_at_once(config: GemmTileConfig, width: int, max_items: int) -> GemmTileConfig:
        items = used * (width // (config.rows * config.parts))
        together = -(-items // NUM_SMS)
        fits_three = config.consumers == 1 and not quantized  # whose CTAs have registers for three
        if (
            columns != GROUP
            or not NUM_SMS < items <= max_items
            or not (fits_three or together == 2)
        ):
            return config
        return dataclasses.replace(config, blocks=together * NUM_SMS, together=together)

    def in_two(config: GemmTileConfig) -> GemmTileConfig:
        split = quantized and config.consumers == 1 and columns == GROUP
        return dataclasses.replace(config, parts=2, split=split)

    num_parts = 2 if hidden % BLOCK == 0 and used * (hidden // BLOCK) >= 4 * NUM_SMS else 1
    gate_up = product(expert_size, hidden, 1)
    if gate_up.consumers == 1 and not quantized:
        gate_up = all_at_once(gate_up, expert_size, NUM_SMS + FEW_MORE)
    down = product(hidden, expert_size, num_parts)
    return MoeTileConfig(
        columns=columns,
        gate_up=in_two(gate_up),
        down=dataclasses.replace(
            all_at_once(down, hidden, 3 * NUM_SMS),
            narrow=rounded and not quantized and columns > NARROWEST,
        ),
        combine=1024 if rounded else 512,
        rounded=rounded,
    )


def padded_rows(tokens: int, top_k: int, experts: int, columns: int, group: int = GROUP) -> int:
    """Returns R, the rows of the tokens, sorted by expert and padded, whatever they choose. The
    last tile may read past the last expert's own."""
    pairs = tokens * top_k
    rows = pairs + (group - 1) * min(experts, pairs)
    return -(-rows // group) * group + max(columns - group, 0)


def compute_max_tiles(tokens: int, top_k: int, experts: int, columns: int) -> int:
    """Returns the most tiles of tokens, whatever they choose."""
    pairs = tokens * top_k
    return min(experts, pairs) + pairs // columns


def stages_of(
    product: GemmTileConfig, columns: int, dtype: str, of_results: str, weights: str
) -> int:
    """Returns the requested stages of the ring, or all that fit in shared memory."""
    if product.stages is not None:
        return product.stages
    width = lambda name: jnp.dtype(name).itemsize  # noqa: E731
    of_weights = product.parts * product.rows * product.depth * width(weights)
    stage = of_weights + columns * product.depth * width(dtype)
    results = product.rows * columns * (width(of_results) + 4 * product.split)
    room = SHARED_BYTES // product.together - RESERVED_BYTES - BARRIER_BYTES - results
    return max(2, min(MOST_STAGES, room // stage))
