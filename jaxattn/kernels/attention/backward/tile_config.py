"""The tile configuration of `attention_backward` for each width."""

import dataclasses

import jax.numpy as jnp

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
ROWS = 64  # rows of one warpgroup's product
DIMS = 64  # dims of a piece, as wide as wgmma's tiles in shared memory
WARPGROUPS = 2  # consumer warpgroups; one more loads and stores


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardTileConfig:
    """The tile sizes, pipeline stages and registers of the kernel.

    Attributes:
        dims, values: Dims of a query and of a value, multiples of 64.
        keys: Keys of a tile. With 128 each warpgroup owns 64 of them; with 64 both have all keys,
            and each owns half of the dims of dk and dv.
        queries: Queries of a step.
        stages, output_stages: Pipeline stages of the queries, and of the output gradients.
        ahead: Whether a step issues the next step's scores. If not, it finishes the last step's dK,
            which takes fewer registers.
        compute_registers, memory_registers: Registers per thread of a consumer and of the producer;
            the three warpgroups have 504 together.
        blocks: Resident CTAs, each taking many tiles; None: one per multiprocessor.
        heads_together: The most key-value heads that are worked on at one time. They share the L2.
    """

    dims: int
    values: int
    keys: int = 128
    queries: int = 64
    stages: int = 2
    output_stages: int = 2
    ahead: bool = True
    compute_registers: int = 240
    memory_registers: int = 24
    blocks: int | None = None
    heads_together: int = 16

    @property
    def by_dims(self) -> bool:
        """Whether the warpgroups divide the dims of dk and dv, and not the keys."""
        return self.keys == ROWS

    def pieces(self, dims: int) -> int:
        return dims // DIMS

    def own_pieces(self, dims: int) -> int:
        """The number of pieces of dk or dv that a warpgroup accumulates."""
        return self.pieces(dims) // (WARPGROUPS if self.by_dims else 1)

    @property
    def parts(self) -> int:
        """The number of parts of a step's dq, 64 queries and 64 dims each."""
        return self.pieces(self.dims) * self.queries // ROWS

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """For each place in shared memory, the parts that leave through it, one after another."""
        even = self.parts // WARPGROUPS
        if even == 1:
            return tuple((part,) for part in range(self.parts))
        return tuple(tuple(range(wg * even, (wg + 1) * even)) for wg in range(WARPGROUPS))

    @property
    def shared_places(self) -> bool:
        """Whether several parts of a step use one place, so that they wait for one another."""
        return self.parts > len(self.places)


# (dims of a query, of a value) -> configuration: the widths that the kernel supports.
CONFIGS = {
    (64, 64): BackwardTileConfig(dims=64, values=64, queries=128),
    (128, 128): BackwardTileConfig(dims=128, values=128),
    (192, 128): BackwardTileConfig(dims=192, values=128, ahead=False),
    (256, 256): BackwardTileConfig(dims=256, values=256, keys=64, output_stages=1),
}
