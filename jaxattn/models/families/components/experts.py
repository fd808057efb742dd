"""Tensors of a mixture of experts: router, routed experts and shared experts."""

import dataclasses
from collections.abc import Collection

from jaxattn.core.numerics.fp8_block_scaling import block_counts
from jaxattn.models.blocks import MoE
from jaxattn.models.weight_map.encodings import (
    FourBitEncoding,
    Fp8NumberEncoding,
    Int4GroupEncoding,
)
from jaxattn.models.weight_map.tensor_mapping import LayerMapping, WeightMapping
from jaxattn.models.weight_map.transforms import SplitExpertColumns, SplitExpertRows


@dataclasses.dataclass(frozen=True)
class ExpertTensorNames:
    """A family's names of its experts' tensors.

    Attributes:
        layer: Name of the whole mixture.
        expert: Names of an expert's gate, up and down projections.
        bias: Name of the router's correction bias.
        bias_of: Name of the module with that bias. None means the router.
    """

    layer: str = "mlp"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    bias: str = "e_score_correction_bias"
    bias_of: str | None = None


def placed(
    place: LayerMapping,
    hidden: int,
    moe: MoE,
    *,
    shared: str = "shared_experts",
    stored: Collection[str] = (),
    names: ExpertTensorNames = ExpertTensorNames(),
) -> list[WeightMapping]:
    """Maps router, routed experts and shared experts.

    Args:
        shared: Name of the shared experts.
        stored: Names of a folder's tensors. transformers may save a layer's routed experts as two.
    """
    count, shared = moe.router.experts, f"{names.layer}.{shared}"
    mappings = [place.matrix(f"{names.layer}.gate", count, hidden, "mlp", "router")]
    if moe.router.scores == "sigmoid":
        name = f"{names.bias_of or f'{names.layer}.gate'}.{names.bias}"
        mappings.append(place.plain(name, (count,), "mlp", "correction_bias"))
    if f"{place.prefix}.{names.layer}.experts.gate_up_proj" in stored:
        mappings += _fused(place, hidden, moe, names.layer)
    else:
        for expert in range(count):
            mappings += _expert(place, hidden, moe, expert, names)
    if moe.shared_gate:
        mappings.append(place.matrix(f"{shared}_gate", 1, hidden, "mlp", "shared_gate"))
    if moe.always:
        mappings += _shared(place, hidden, moe, shared)
    elif size := moe.shared_size:
        for name, out, inner in (
            ("gate_proj", size, hidden), ("up_proj", size, hidden), ("down_proj", hidden, size)
        ):  # fmt: skip
            tensor = f"{shared}.{name}"
            mappings.append(place.linear(tensor, out, inner, "mlp", "shared", name))
    return mappings


def _fused(place: LayerMapping, hidden: int, moe: MoE, layer: str) -> list[WeightMapping]:
    """Maps routed experts stored as two tensors: gate and up rows in one, down rows in another."""
    count, width = moe.router.experts, moe.expert_size
    return [
        place.plain(f"{layer}.experts.{name}", (count, *shape), "mlp", name)
        for name, shape in (("gate_up_proj", (2 * width, hidden)), ("down_proj", (hidden, width)))
    ]


def _shared(place: LayerMapping, hidden: int, moe: MoE, name: str) -> list[WeightMapping]:
    """Maps the three linears of the shared experts, and their scales if experts stay FP8."""
    width, first = moe.expert_size, moe.router.experts
    up, down = (moe.shared_size, hidden), (hidden, moe.shared_size)
    kept = Fp8NumberEncoding() if moe.weight_format == "fp8" else None
    both, last = ("mlp", "gate_up_proj"), ("mlp", "down_proj")
    gate_rows, up_rows = (SplitExpertRows(width, first, (below, 0)) for below in (0, width))
    columns = SplitExpertColumns(width, first)
    mappings = [
        place.shared(f"{name}.gate_proj", *up, gate_rows, *both, stored=kept),
        place.shared(f"{name}.up_proj", *up, up_rows, *both, stored=kept),
        place.shared(f"{name}.down_proj", *down, columns, *last, stored=kept),
    ]
    if kept is None:
        return mappings
    (blocks,) = block_counts(width)
    gate_rows, up_rows = (SplitExpertRows(blocks, first, (number, 0, 0)) for number in (0, 1))
    columns, scale = SplitExpertColumns(blocks, first), ("mlp", "gate_up_scale")
    return [
        *mappings,
        place.shared_scale(f"{name}.gate_proj", *up, gate_rows, *scale),
        place.shared_scale(f"{name}.up_proj", *up, up_rows, *scale),
        place.shared_scale(f"{name}.down_proj", *down, columns, "mlp", "down_scale"),
    ]


def _expert(
    place: LayerMapping, hidden: int, moe: MoE, expert: int, names: ExpertTensorNames
) -> list[WeightMapping]:
    """Maps the three linears of a routed expert, and their scales if they stay FP8."""
    width = moe.expert_size
    gate_name, up_name, down_name = (
        f"{names.layer}.experts.{expert}.{each}" for each in names.expert
    )
    up, down = (expert, width, hidden), (expert, hidden, width)
    if moe.form is not None and moe.form.kind == "int4":
        tiles = FourBitEncoding(Int4GroupEncoding(moe.form.group), moe.form)
        gate_up_path = ("mlp", "gate_up_proj")
        return [
            place.expert_tiles(gate_name, *up, *gate_up_path, number=0, stored=tiles),
            place.expert_tiles(up_name, *up, *gate_up_path, number=1, stored=tiles),
            place.expert_tiles(down_name, *down, "mlp", "down_proj", stored=tiles),
        ]
    kept = Fp8NumberEncoding() if moe.weight_format == "fp8" else None
    gate_up_path, last = ("mlp", "gate_up_proj"), ("mlp", "down_proj")
    found = [
        place.expert(gate_name, *up, *gate_up_path, stored=kept),
        place.expert(up_name, *up, *gate_up_path, first_row=width, stored=kept),
        place.expert(down_name, *down, *last, stored=kept),
    ]
    if kept is None:
        return found
    scale = "mlp", "gate_up_scale"
    return [
        *found,
        place.expert_scale(gate_name, *up, *scale, number=0),
        place.expert_scale(up_name, *up, *scale, number=1),
        place.expert_scale(down_name, *down, "mlp", "down_scale"),
    ]
