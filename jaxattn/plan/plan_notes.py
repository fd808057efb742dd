"""The text of a plan besides its items: its title, its assumptions, and the cache's reader."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.mla.decode import launch as mla_decode
from jaxattn.kernels.mla.decode.arguments import MlaDecodeCall
from jaxattn.kernels.mla.sparse import launch as mla_sparse
from jaxattn.limits import Limits
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.plan import nbytes
from jaxattn.models.blocks import GQA
from jaxattn.models.caches.cache_layouts import LatentPages, RecurrentState, SparseLatentPages
from jaxattn.models.caches.layer_cache import CacheSize
from jaxattn.models.catalog.decoder_sizes import DecoderSizes
from jaxattn.models.catalog.model_sizes import ModelSizes
from jaxattn.plan.placement import CACHE_DTYPES, ModelPlacement, caches


def title(model: ModelSizes, limits: Limits, place: ModelPlacement, memory: DeviceMemory) -> str:
    """Returns the title of a plan."""
    each = "per GPU" if place.attention == "data" and place.gpus > 1 else "in all"
    one = f"{place.gpus} x {memory.name}, one of them" if place.gpus > 1 else memory.name
    return (
        f"{model.name} on {one}: {limits.batch:,} rows {each} of up to "
        f"{limits.max_model_len:,} tokens"
    )


def notes(model: ModelSizes, limits: Limits, place: ModelPlacement) -> tuple[str, ...]:
    """Returns the assumptions of a plan, and the implementation that reads its cache."""
    utilization = 0.9 if limits.utilization is None else limits.utilization
    own = caches(model, place)
    found = [
        f"Utilization {utilization:g} is the fraction of the device's total memory for arrays "
        "and XLA's temp; the remaining memory must have room for the driver.",
        *_of_weights(model, place),
    ]
    if place.gpus > 1:
        found += _of_group(place, any(isinstance(cache, LatentPages) for cache in own))
    for cache in own:
        if isinstance(cache, RecurrentState):
            found.append(
                f"Convolution states are {jnp.dtype(cache.conv_dtype).name}, recurrent states "
                "float32, one slot per row and layer."
            )
        elif isinstance(cache, LatentPages):
            found.append(_reader(cache, model.num_heads // place.ways, model.dtype))
            if cache.format.dtype.itemsize == 1 and not isinstance(cache, SparseLatentPages):
                found.append(
                    "An FP8 cache has room for more tokens. On an H200, decoding from it takes "
                    "0.6 times as long as from bfloat16 with 16 heads, and 2.0 to 2.3 times as "
                    "long with 128."
                )
            if isinstance(model, DecoderSizes) and cache.format.per_tensor:
                found.append(
                    "No jaxattn model serves a float8 cache yet: the plan counts its pages, but "
                    "temp is that of the model's own cache."
                )
    return tuple(found)


def _of_weights(model: ModelSizes, place: ModelPlacement) -> list[str]:
    found = []
    if isinstance(model, DecoderSizes):
        found.append("Weights, caches and scratch are those of the model that jaxattn serves.")
        if model.quantization == "fp8":
            found.append(
                "With every FP8 matrix kept in FP8, all weights would take "
                f"{model.whole_fp8_bytes:,} bytes instead of {model.total_bytes():,}."
            )
    else:
        found.append(
            "Sizes are from the model's public config.json; jaxattn cannot run the model yet."
        )
    if model.unread:
        found.append(f"The loader skips {model.unread}.")
    if isinstance(model, DecoderSizes):
        windows = {
            each.window for each in model.model.spec.mixers.values() if isinstance(each, GQA)
        }
        for window in sorted(filter(None, windows)):
            found.append(
                "Layers with a window keep the keys and values of all tokens of a row, but read "
                f"only the last {window:,}."
            )
    return found


def _of_group(place: ModelPlacement, latents: bool) -> list[str]:
    divided = (
        "every GPU has its own rows, and the whole attention, dense layers, embedding and head"
        if place.attention == "data"
        else "attention, dense layers, embedding and head are divided by heads or columns; all "
        "GPUs have the same rows"
    )
    found = [f"Routed experts are divided over {place.gpus} GPUs without splitting any; {divided}."]
    found.append(
        "This plan counts the memory of a group; to plan a layout that jaxattn's engine runs, use "
        "--tensor, --data, --context and --expert."
    )
    if place.attention == "tensor" and latents:
        found.append("An MLA cache has no heads, so every GPU of the group stores the whole cache.")
    return found


def _reader(latents: LatentPages, heads: int, dtype: str) -> str:
    """Returns a note on the kernel, or XLA, that decodes from the cache on a Hopper GPU."""
    cache = latents.shapes(CacheSize(pages=1, slots=1))[latents.array]
    names = {jnp.dtype(dtype).name: name for name, dtype in CACHE_DTYPES.items()}
    name = names.get(cache.dtype.name, cache.dtype.name)
    form = latents.format
    q = jax.ShapeDtypeStruct((1, 1, heads, form.kv_lora_rank + form.qk_rope_head_dim), dtype)
    token = nbytes(cache) // (latents.layers * PAGE_SIZE)
    try:
        if isinstance(latents, SparseLatentPages):
            given: Any = dict(
                q=q,
                kv_cache=cache,
                block_tables=jax.ShapeDtypeStruct((1, 1), jnp.int32),
                seq_lens=jax.ShapeDtypeStruct((1,), jnp.int32),
            )
            rank = form.kv_lora_rank
            mla_sparse.refuse(MlaDecodeCall(**given, scale=1.0, kv_lora_rank=rank))
            return (
                f"The sparse MLA kernel reads the {name} cache: {token:,} bytes per chosen token "
                "and layer."
            )
        mla_decode.refuse(q, cache, form.kv_lora_rank)
    except Refusal as refusal:
        return f"XLA reads the {name} cache: {refusal}."
    return f"MLA's decode kernel reads the {name} cache: {token:,} bytes per token and layer."
