"""Feed-forwards on several GPUs: an MLP by columns; experts by columns, whole, or both.

Shared experts that follow the routed ones in the stack are on every GPU with whole experts, and
each GPU computes them for a part of the tokens.
"""

import dataclasses

from jaxattn.core.numerics.four_bit_tiles import ROWS
from jaxattn.core.numerics.fp8_block_scaling import BLOCK, block_counts
from jaxattn.models.blocks.feed_forward import MLP, MoE
from jaxattn.models.blocks.mixer import Stream
from jaxattn.models.sharding.axis_sharding import (
    AxisSharding,
    Cuts,
    ShardedLayer,
    ShardingError,
    refuse,
    shard_layer,
)
from jaxattn.parallel import Dimension, Parallel


@shard_layer.register
def shard_mlp(layer: MLP, stream: Stream, parallel: Parallel) -> ShardedLayer[MLP]:
    """Divides a gated MLP: columns of the first two products, rows of the last."""
    size, ways = layer.intermediate_size, parallel.tensor
    if size % ways:
        raise refuse("columns of an MLP", size, "tensor", ways)
    local = dataclasses.replace(layer, intermediate_size=size // ways)
    return ShardedLayer(local, _cuts_of_mlp(size, "tensor"))


@shard_layer.register
def shard_moe(layer: MoE, stream: Stream, parallel: Parallel) -> ShardedLayer[MoE]:
    """Divides a mixture of experts; the router is whole on every GPU, so that all choose alike."""
    experts, size = layer.router.experts, layer.expert_size
    groups, columns = parallel.size("expert"), parallel.size("columns")
    num_expert_gpus = parallel.size("experts")
    if experts % groups:
        raise refuse("experts", experts, "expert", groups)
    if size % columns:
        raise refuse("columns of an expert", size, "tensor / expert", columns)
    fp8 = layer.weight_format == "fp8"
    if fp8 and columns > 1 and size // columns % BLOCK:
        raise ShardingError(
            f"{size} columns of an FP8 expert over {columns} GPUs are {size // columns} each, "
            f"which do not divide into blocks of {BLOCK} that share a scale; use "
            f"expert={parallel.size('experts')}, which divides no expert"
        )
    if layer.form is not None and not layer.form.fits(size // columns, size // columns):
        form = layer.form
        raise ShardingError(
            f"{size} columns of a 4-bit expert over {columns} GPUs are {size // columns} each, "
            f"which do not divide into tiles of {ROWS} rows and {form.columns} columns; use "
            f"expert={num_expert_gpus}, which divides no expert, or experts='bfloat16'"
        )
    shared = columns if layer.always else num_expert_gpus
    if layer.shared_size % shared:
        raise refuse("columns of the shared experts", layer.shared_size, "tensor", shared)
    local = dataclasses.replace(
        layer,
        expert_size=size // columns,
        shared_size=layer.shared_size // shared,
        parallel=parallel,
    )
    # The routed experts by number, followed by the shared ones.
    runs = ((experts, 1), (layer.always, 1)) if layer.always else ((experts, 1),)
    num_replicated = 1 if layer.always else 0

    def of_experts(axis: int, columns_axis: int, runs_of_columns: tuple) -> Cuts:
        return (
            AxisSharding(axis, "expert", runs, num_replicated),
            AxisSharding(columns_axis, "columns", runs_of_columns),
        )

    (blocks,) = block_counts(size)
    cuts = {
        "gate_up_proj": of_experts(-3, -2, ((size, 1), (size, 1))),
        "down_proj": of_experts(-3, -1, ((size, 1),)),
        "gate_up_bias": of_experts(-2, -1, ((size, 1), (size, 1))),
        "down_bias": (AxisSharding(-2, "expert", runs, num_replicated),),
        "gate_up_scale": of_experts(-4, -2, ((blocks, 1),)),
        "down_scale": of_experts(-3, -1, ((blocks, 1),)),
    }
    if layer.form is not None:
        tiles = ((size // ROWS, 1),), ((size // layer.form.columns, 1),)
        cuts["gate_up_proj"] = of_experts(-5, -3, tiles[0])
        cuts["down_proj"] = of_experts(-4, -2, tiles[1])
    if layer.shared_size and not layer.always:
        of_mlp = _cuts_of_mlp(layer.shared_size, "experts")
        cuts |= {f"shared.{name}": cut for name, cut in of_mlp.items()}
    return ShardedLayer(local, cuts)


def _cuts_of_mlp(size: int, dimension: Dimension) -> dict[str, Cuts]:
    columns, rows = (
        (AxisSharding(-1, dimension, ((size, 1),)),),
        (AxisSharding(-2, dimension, ((size, 1),)),),
    )
    return {"gate_proj": columns, "up_proj": columns, "down_proj": rows}
