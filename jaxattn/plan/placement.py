"""How a group of GPUs holds a public model: what one of them has of weights, cache and states."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from jaxattn.core.formats import LatentFormat
from jaxattn.engine import memory_plan
from jaxattn.memory.budget import Item
from jaxattn.memory.limits import Limits
from jaxattn.models.base import LayerCache
from jaxattn.models.caches import KeyValuePages, LatentPages, RecurrentState
from jaxattn.models.known import KnownModel, Weights

# What `Placement.cache_dtype` and --cache-dtype call a format, and its dtype.
CACHE_DTYPES = {"bfloat16": "bfloat16", "float8": "float8_e4m3fn", "uint8": "uint8"}

Attention = Literal["data", "tensor"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """How a group of GPUs holds a model.

    Attributes:
        gpus: in the group. Routed experts are divided over all of them, whole ones.
        attention: "data": each GPU has all of attention, the dense layers and the ends, and rows,
            cache and states of its own. "tensor": those are divided by heads (by vocabulary at
            the ends), all GPUs have the same rows, and an MLA cache, which has no heads, is on
            every one of them.
        cache_dtype: "bfloat16"; "float8", one byte per number and one scale for the whole cache;
            or "uint8" for an MLA cache, block-scaled (`LatentFormat`).
        prediction: load the checkpoint's prediction layers (MTP) as well.

    Raises:
        ValueError: a field does not fit.
    """

    gpus: int = 1
    attention: Attention = "data"
    cache_dtype: str = "bfloat16"
    prediction: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.gpus, bool) or not isinstance(self.gpus, int) or self.gpus < 1:
            raise ValueError(f"gpus must be a positive integer; got {self.gpus!r}")
        if self.attention not in ("data", "tensor"):
            raise ValueError(f"attention must be 'data' or 'tensor'; got {self.attention!r}")
        if self.cache_dtype not in CACHE_DTYPES:
            raise ValueError(
                f"cache_dtype must be one of {sorted(CACHE_DTYPES)}; got {self.cache_dtype!r}"
            )

    @property
    def ways(self) -> int:
        """By how many attention, dense layers and ends are divided."""
        return self.gpus if self.attention == "tensor" else 1


def caches(model: KnownModel, place: Placement) -> tuple[LayerCache, ...]:
    """What one GPU keeps of its rows."""
    dtype, found = CACHE_DTYPES[place.cache_dtype], list[LayerCache]()
    if model.is_mla:
        latents = LatentFormat(
            dtype, model.config["kv_lora_rank"], model.config["qk_rope_head_dim"]
        )
        found.append(LatentPages(name="latents", layers=model.attention_layers, format=latents))
    else:
        found.append(
            KeyValuePages(
                name="keys and values",
                layers=model.attention_layers,
                # With more GPUs than heads, each GPU holds a copy of one.
                heads=-(-model.cache_heads // place.ways),
                head_dim=model.config["head_dim"],
                dtype=jnp.dtype(dtype),
            )
        )
    if model.state_layers:
        found.append(
            RecurrentState(
                name="states",
                layers=model.state_layers,
                conv_shape=(model.conv_taps, model.conv_channels // place.ways),
                conv_dtype=jnp.dtype("bfloat16"),
                state_shape=(model.state_heads // place.ways, *model.state_shape),
                kind="delta-rule",
            )
        )
    return tuple(found)


def page_bytes(model: KnownModel, place: Placement) -> int:
    """Of a page in all layers, on one GPU."""
    return memory_plan.page_bytes(caches(model, place))


def check_placement(model: KnownModel, limits: Limits, place: Placement) -> None:
    if limits.max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len={limits.max_model_len:,} is longer than {model.name}'s "
            f"{model.max_position_embeddings:,}"
        )
    if place.cache_dtype == "uint8" and not model.is_mla:
        raise ValueError(
            f"cache_dtype='uint8' is a format of MLA's latents, and {model.name} caches keys and "
            "values; use 'float8'"
        )
    experts = model.config.get("n_routed_experts", model.config.get("num_experts", 0))
    if experts and place.gpus > experts:
        raise ValueError(f"gpus={place.gpus} is more than {model.name}'s {experts} experts")
    for what, heads in (
        ("attention heads", model.config["num_attention_heads"]),
        ("state heads", model.state_heads),
    ):
        if heads % place.ways:
            raise ValueError(
                f"{model.name}'s {heads} {what} cannot be divided over {place.ways} GPUs; use "
                "attention='data' or another number"
            )


def _share(model: KnownModel, weights: Weights, place: Placement) -> int:
    """Bytes of these matrices on one GPU."""
    numbers, scales = model.stored_bytes(weights)
    each = numbers + scales
    if weights.split == "experts":
        # Whole experts: `count` is layers x experts x equal shares.
        experts = model.config.get("n_routed_experts", model.config.get("num_experts", 1))
        layers = weights.count // experts
        return layers * -(-experts // place.gpus) * each
    ways = place.ways if weights.split in ("attention", "dense") else 1
    return weights.count * -(-each // ways)


def weight_items(model: KnownModel, place: Placement) -> list[Item]:
    groups: dict[str, list[Weights]] = {}
    for weights in (*model.weights, *(model.extra if place.prediction else ())):
        groups.setdefault(weights.kind, []).append(weights)
    parts = [
        Item(
            f"{kind} weights",
            sum(_share(model, weights, place) for weights in group),
            f"{sum(w.parameters for w in group):,} parameters"
            + (f", divided over {place.gpus} GPUs" if kind == "experts" and place.gpus > 1 else ""),
        )
        for kind, group in groups.items()
    ]
    total = sum(part.nbytes for part in parts)
    stored = "as the checkpoint stores them" + (", FP8 with scales" if model.block else "")
    return [Item("weights", total, stored, tuple(parts))]
