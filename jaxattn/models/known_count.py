"""Models that this package cannot run yet, counted by hand from their config.json.

Kimi-Linear. A `model_type` that has a family
(`models/registry.py`) is planned from its own shapes, and leaves this file.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from jaxattn import gdn, mla
from jaxattn.arena import ArenaSpec
from jaxattn.core.formats import LatentFormat
from jaxattn.core.fp8_blocks import BLOCK
from jaxattn.models.base import LayerCache
from jaxattn.models.caches import LatentPages, RecurrentState
from jaxattn.models.families.fields import ConfigError, Fields
from jaxattn.models.known_model import KnownModel, Sizes, Weights
from jaxattn.models.quantization import Quantization, read_quantization

# The formats of latents, and their dtypes.
FORMATS = {
    "auto": "bfloat16",
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_block": "uint8",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountedModel(KnownModel):
    """A model that no code of this package runs, for a plan.

    Attributes:
        counted: what its activations are bounded by.
        whole: its caches on a GPU with all heads, in bfloat16.
        cache_format: of its pages, of `FORMATS`.
    """

    counted: Sizes
    whole: tuple[LayerCache, ...]
    cache_format: str = "auto"

    @property
    def sizes(self) -> Sizes:
        return self.counted

    @property
    def num_heads(self) -> int:
        return self.counted.num_heads

    def in_cache_format(self, name: str, native_layers: int = 0) -> "CountedModel":
        if name not in FORMATS:
            raise ValueError(
                f"cache_format={name!r} is no format of {self.name}'s cache, which has "
                f"{', '.join(FORMATS)}"
            )
        if native_layers:
            raise ValueError(
                f"native_layers={native_layers}: all layers of {self.name} share one format of "
                "cache; leave it 0"
            )
        return dataclasses.replace(self, cache_format=name)

    def caches(self, ways: int = 1, cache_dtype: str | None = None) -> tuple[LayerCache, ...]:
        dtype = cache_dtype or FORMATS[self.cache_format]
        return tuple(_share(cache, ways, dtype) for cache in self.whole)

    def scratch(
        self, rows: int, *, q_len: int, max_pages: int, ways: int = 1, gathered: int = 1
    ) -> tuple[ArenaSpec, ...]:
        found = []
        for cache in self.caches(ways):
            if isinstance(cache, LatentPages):
                heads = self.sizes.num_heads // ways
                rank = cache.format.kv_lora_rank
                sizes = dict(num_heads=heads, kv_lora_rank=rank, max_pages=max_pages)
                found.append(mla.scratch(batch=rows, q_len=q_len, **sizes))
            elif isinstance(cache, RecurrentState):
                heads, dim, _ = cache.state_shape
                found.append(
                    gdn.scratch(batch=rows, q_len=q_len, num_v_heads=heads, head_v_dim=dim)
                )
        return tuple(found)


def _share(cache: LayerCache, ways: int, dtype: str) -> LayerCache:
    """What one of `ways` GPUs has of a cache."""
    if isinstance(cache, LatentPages):  # which have no heads
        return dataclasses.replace(cache, format=dataclasses.replace(cache.format, dtype=dtype))
    assert isinstance(cache, RecurrentState)
    (taps, channels), (heads, values, keys) = cache.conv_shape, cache.state_shape
    return dataclasses.replace(
        cache, conv_shape=(taps, channels // ways), state_shape=(heads // ways, values, keys)
    )


def count(name: str, values: Mapping[str, Any], where: str) -> CountedModel:
    """The parts of a model of `MODEL_TYPES`.

    Args:
        values: a config.json, in which a `text_config` may hold the fields.
        where: the file, for messages.

    Raises:
        ConfigError: a field is missing or does not fit; it is named.
    """
    fields = Fields(values, where).text()
    build = MODEL_TYPES[fields.values["model_type"]]
    return build(name, fields, read_quantization(fields))


def _kimi(name: str, f: Fields, stored: Quantization | None) -> CountedModel:
    layers, hidden, rank = _layers(f), f.integer("hidden_size"), f.integer("kv_lora_rank")
    linear = f.values.get("linear_attn_config")
    if not isinstance(linear, dict):
        raise ConfigError(f"{f.where}: linear_attn_config must be an object; got {linear!r}")
    of_linear = Fields(linear, f"{f.where}: linear_attn_config")
    attending = linear.get("full_attn_layers")
    if not isinstance(attending, list) or not set(attending) <= set(range(1, layers + 1)):
        raise ConfigError(
            f"{of_linear.where}: full_attn_layers must be layers from 1 to {layers}; got "
            f"{attending!r}"
        )
    full, dense = len(attending), f.integer("first_k_dense_replace", least=0)
    if dense > layers:
        raise ConfigError(
            f"{f.where}: first_k_dense_replace={dense:,} is more than num_hidden_layers={layers:,}"
        )
    heads, dim = of_linear.integer("num_heads"), of_linear.integer("head_dim")
    taps = of_linear.integer("short_conv_kernel_size")
    kda, width, experts = layers - full, heads * dim, f.integer("num_experts")
    size, shared = f.integer("moe_intermediate_size"), f.integer("num_shared_experts", least=0)
    mlp = f.integer("intermediate_size")
    delta = (
        Weights("KDA", (width, hidden), 3 * kda, "attention"),
        Weights("KDA", (3 * width, taps), kda, "attention", False),
        Weights("KDA", (dim, hidden), 2 * kda),
        Weights("KDA", (width, dim), 2 * kda, "attention"),
        Weights("KDA", (heads, hidden), kda, "attention"),
        Weights("KDA", (heads + width,), kda, "attention", False, 4),
        Weights("KDA", (dim,), kda, "all", False),
        Weights("KDA", (hidden, width), kda, "attention"),
    )
    rope = f.integer("qk_rope_head_dim")
    latents = LatentFormat("bfloat16", rank, rope)
    return CountedModel(
        name=name,
        weights=(
            *_mla(f, full),
            *delta,
            *_mlp("dense MLP", hidden, mlp, dense, "dense"),
            *_mlp("experts", hidden, size, (layers - dense) * experts, "experts"),
            *_mlp("shared experts", hidden, shared * size, layers - dense, "dense"),
            Weights("router", (experts, hidden), layers - dense, "all", False),
            Weights("router", (experts,), layers - dense, "all", False, 4),
            *_ends(f, layers),
        ),
        max_position_embeddings=f.integer("model_max_length"),
        stored=_words(stored),
        block=BLOCK if stored == "fp8" else 0,
        counted=Sizes(
            vocab_size=f.integer("vocab_size"),
            hidden_size=hidden,
            num_heads=f.integer("num_attention_heads"),
            qk_dim=f.integer("qk_nope_head_dim") + rope,
            v_dim=f.integer("v_head_dim"),
            latent=rank + rope,
            low_rank=f.maybe_integer("q_lora_rank") or 0,
            mlp_size=max(mlp, shared * size),
            experts=experts,
            top_k=f.integer("num_experts_per_token"),
            expert_size=size,
            state_heads=heads,
            key_heads=heads,
            state_shape=(dim, dim),
            conv_channels=3 * width,
        ),
        whole=(
            LatentPages(name="latents", layers=full, format=latents),
            *_states(kda, taps, 3 * width, (heads, dim, dim)),
        ),
    )


def _layers(f: Fields) -> int:
    return f.integer("num_hidden_layers")


def _words(stored: Quantization | None) -> str:
    return "as the checkpoint stores them" + (", FP8 with scales" if stored == "fp8" else "")


def _states(
    layers: int, taps: int, channels: int, shape: tuple[int, int, int]
) -> Iterator[RecurrentState]:
    if layers:
        yield RecurrentState(
            name="states",
            layers=layers,
            conv_shape=(taps - 1, channels),
            conv_dtype=jnp.dtype("bfloat16"),
            state_shape=shape,
            kind="delta-rule",
        )


def _mla(f: Fields, layers: int) -> Iterator[Weights]:
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    nope, rope = f.integer("qk_nope_head_dim"), f.integer("qk_rope_head_dim")
    rank, value = f.integer("kv_lora_rank"), f.integer("v_head_dim")
    queries = heads * (nope + rope)
    if low := f.maybe_integer("q_lora_rank"):
        yield Weights("MLA", (low, hidden), layers)
        yield Weights("MLA", (queries, low), layers, "attention")
        yield Weights("MLA", (low,), layers, "all", False)
    else:
        yield Weights("MLA", (queries, hidden), layers, "attention")
    yield Weights("MLA", (rank + rope, hidden), layers)
    yield Weights("MLA", (rank,), layers, "all", False)
    yield Weights("MLA", (heads * (nope + value), rank), layers, "attention")
    yield Weights("MLA", (hidden, heads * value), layers, "attention")


def _mlp(kind: str, hidden: int, width: int, count: int, split: Any) -> Iterator[Weights]:
    yield Weights(kind, (width, hidden), 2 * count, split)
    yield Weights(kind, (hidden, width), count, split)


def _ends(f: Fields, layers: int) -> Iterator[Weights]:
    """The norms, the embedding and, unless it is tied, the head."""
    shape = (f.integer("vocab_size"), f.integer("hidden_size"))
    yield Weights("norms", shape[1:], 2 * layers + 1, "all", False)
    yield Weights("embedding", shape, 1, "dense", False)
    if not f.flag("tie_word_embeddings", False):
        yield Weights("head", shape, 1, "dense", False)


MODEL_TYPES: dict[str, Callable[[str, Fields, Quantization | None], CountedModel]] = {
    "kimi_linear": _kimi,
}
