"""Placement of a model on a group of GPUs: one GPU's share of weights, cache and states."""

import dataclasses
from typing import Literal

from jaxattn.core.validation.array_checks import is_integer
from jaxattn.engine.startup import memory_plan
from jaxattn.limits import Limits
from jaxattn.memory.plan import PlanItem
from jaxattn.models.caches.cache_layouts import LatentPages
from jaxattn.models.caches.layer_cache import LayerCache
from jaxattn.models.catalog.model_sizes import ModelSizes, WeightGroup

# The names of formats in `ModelPlacement.cache_dtype` and --cache-dtype, with their dtypes.
CACHE_DTYPES = {"bfloat16": "bfloat16", "float8": "float8_e4m3fn", "uint8": "uint8"}

Attention = Literal["data", "tensor"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPlacement:
    """The distribution of a model over a group of GPUs.

    Attributes:
        gpus: The number of GPUs. The routed experts are distributed over all of them, each expert
            whole.
        attention: "data": each GPU has all of attention, the dense layers, embedding and head, and
            has its own rows, cache and states. "tensor": attention is divided by heads, embedding
            and head by the vocabulary, and all GPUs have the same rows. An MLA cache has no heads,
            so each GPU has all of it.
        cache_dtype: "bfloat16"; "float8", one byte per number and one scale for the whole cache;
            or "uint8", block-scaled (`LatentFormat`). The last two need an MLA cache. None means
            the model's own.

    Raises:
        ValueError: A field is invalid.
    """

    gpus: int = 1
    attention: Attention = "data"
    cache_dtype: str | None = None

    def __post_init__(self) -> None:
        if not is_integer(self.gpus) or self.gpus < 1:
            raise ValueError(f"gpus must be a positive integer; got {self.gpus!r}")
        if self.attention not in ("data", "tensor"):
            raise ValueError(f"attention must be 'data' or 'tensor'; got {self.attention!r}")
        if self.cache_dtype is not None and self.cache_dtype not in CACHE_DTYPES:
            raise ValueError(
                f"cache_dtype must be one of {sorted(CACHE_DTYPES)}; got {self.cache_dtype!r}"
            )

    @property
    def ways(self) -> int:
        """The number of parts of attention, the dense layers, embedding and head."""
        return self.gpus if self.attention == "tensor" else 1

    @property
    def stored_dtype(self) -> str | None:
        """The dtype of `cache_dtype`."""
        return None if self.cache_dtype is None else CACHE_DTYPES[self.cache_dtype]


def caches(model: ModelSizes, place: ModelPlacement) -> tuple[LayerCache, ...]:
    """Returns the caches of one GPU."""
    return model.caches(place.ways, place.stored_dtype)


def latents_of(model: ModelSizes) -> LatentPages | None:
    """Returns the model's MLA cache, or None."""
    return next((each for each in model.caches() if isinstance(each, LatentPages)), None)


def page_bytes(model: ModelSizes, place: ModelPlacement) -> int:
    """Returns the bytes of a page in all layers, on one GPU."""
    return memory_plan.page_bytes(caches(model, place))


def check_placement(model: ModelSizes, limits: Limits, place: ModelPlacement) -> None:
    """Raises ValueError, with the sizes, if a group cannot hold the model with this placement."""
    if limits.max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len={limits.max_model_len:,} exceeds {model.name}'s "
            f"{model.max_position_embeddings:,}"
        )
    if place.cache_dtype in ("uint8", "float8") and latents_of(model) is None:
        raise ValueError(
            f"cache_dtype={place.cache_dtype!r} is a format for MLA latents, but {model.name} has "
            "none; leave cache_dtype out"
        )
    if place.gpus == 1:
        return
    sizes = model.sizes
    if sizes.experts and place.gpus > sizes.experts:
        raise ValueError(f"gpus={place.gpus} exceeds {model.name}'s {sizes.experts} experts")
    for what, heads in (
        ("attention heads", sizes.num_heads),
        ("state heads", sizes.state_heads),
        ("key heads", sizes.key_heads),
    ):
        if heads % place.ways:
            raise ValueError(
                f"{model.name}'s {heads} {what} cannot be divided over {place.ways} GPUs; use "
                "attention='data' or another number of GPUs"
            )


def weight_items(model: ModelSizes, place: ModelPlacement) -> list[PlanItem]:
    """Returns the item of the weights on one GPU; its parts add up to it."""
    groups: dict[str, list[WeightGroup]] = {}
    for weights in model.weights:
        groups.setdefault(weights.kind, []).append(weights)
    parts = [
        PlanItem(
            f"{kind} weights",
            sum(_share(model, weights, place) for weights in group),
            f"{sum(w.parameters for w in group):,} parameters"
            + (f", divided over {place.gpus} GPUs" if kind == "experts" and place.gpus > 1 else ""),
        )
        for kind, group in groups.items()
    ]
    if copied := model.copied_bytes(place.ways):
        why = "float32 copies of norms and small weights, in stacks that the steps read"
        parts.append(PlanItem("packed weights", copied, why))
    total = sum(part.nbytes for part in parts)
    return [PlanItem("weights", total, model.stored, tuple(parts))]


def _share(model: ModelSizes, weights: WeightGroup, place: ModelPlacement) -> int:
    """Returns the bytes of these matrices on one GPU."""
    each = sum(model.stored_bytes(weights))
    if weights.split == "experts":
        # Experts stay whole: `count` is layers x experts x equal shares.
        experts = model.sizes.experts if place.gpus > 1 else 1
        return weights.count // experts * -(-experts // place.gpus) * each
    ways = place.ways if weights.split in ("attention", "dense") else 1
    return weights.count * -(-each // ways)
