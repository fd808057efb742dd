"""The hybrid decoder's configuration, in DeepSeek-V3's names (MLA) and Qwen3-Next's (linear_*)."""

import dataclasses
from typing import Annotated, Any, Self

import jax.numpy as jnp

from jaxattn.core.cache.formats import BLOCK, LatentFormat
from jaxattn.core.numerics.rope import MOST_ROPE_DIMS, RopeConfig
from jaxattn.core.validation.arguments import MOST
from jaxattn.core.validation.config_fields import (
    Flag,
    Integer,
    NestedConfig,
    Nullable,
    Number,
    OneOf,
    check_fields,
    from_dict,
)

DTYPES = ("bfloat16", "float32")
CACHE_DTYPES = ("uint8",)

MOST_LAYERS = 1024
# With these limits, a stack of weights has fewer than 2**63 bytes, the most that XLA can count.
MOST_SIZE, MOST_VOCAB, MOST_WIDTH = 2**20, 2**24, 2**24
# The layers of a repeat and the taps of a convolution are unrolled, so each is traced and compiled.
MOST_UNROLLED = 64
# A smaller eps is 0 in float32, and the norm of a row of zeros would be NaN.
LEAST_EPS = float(jnp.finfo("float32").tiny)

_SIZE = Integer(1, MOST_SIZE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """`num_repeats` times `gdn_per_repeat` GDN layers and one MLA layer, each with a gated MLP.

    Attributes:
        intermediate_size: Width of the MLPs.
        num_attention_heads .. v_head_dim: Sizes of the MLA layers. `q_lora_rank` None projects
        queries directly.
        linear_*: Sizes of the GDN layers. Value head h uses key head h // (value heads // key
        heads).
        max_position_embeddings: Maximum length of a row in tokens. No allocation depends on it.
        tie_embeddings: Whether the output head is the transposed embedding.
        dtype: Dtype of matrix product operands and of the convolution state. The residual stream,
            the norms, the gates and the recurrent state are always float32.
        cache_dtype: Dtype of the latent cache. None means `dtype`; "uint8" means block-scaled FP8,
            656 bytes per token for 512 + 64 (`jaxattn.mla.LatentFormat`).
        param_dtype: Dtype in which the weights are stored.

    Raises:
        ValueError: A field does not fit; the message names it and its value. Sizes also have
            maxima, the constants above, which are far above practical models.
    """

    vocab_size: Annotated[int, Integer(1, MOST_VOCAB)]
    hidden_size: Annotated[int, _SIZE]
    intermediate_size: Annotated[int, _SIZE]
    num_repeats: Annotated[int, Integer(1, MOST_LAYERS)]
    gdn_per_repeat: Annotated[int, Integer(0, MOST_UNROLLED - 1)] = 3
    num_attention_heads: Annotated[int, _SIZE]
    q_lora_rank: Annotated[int | None, Nullable(_SIZE)] = None
    kv_lora_rank: Annotated[int, _SIZE] = 512
    qk_nope_head_dim: Annotated[int, _SIZE] = 128
    qk_rope_head_dim: Annotated[int, Integer(2, MOST_ROPE_DIMS, multiple_of=2)] = 64
    v_head_dim: Annotated[int, _SIZE] = 128
    rope: Annotated[RopeConfig, NestedConfig(RopeConfig)] = RopeConfig(dim=64)
    linear_num_key_heads: Annotated[int, _SIZE] = 1
    linear_num_value_heads: Annotated[int, _SIZE] = 1
    linear_key_head_dim: Annotated[int, _SIZE] = 128
    linear_value_head_dim: Annotated[int, _SIZE] = 128
    linear_conv_kernel_dim: Annotated[int, Integer(2, MOST_UNROLLED)] = 4
    rms_norm_eps: Annotated[float, Number(LEAST_EPS, 1)] = 1e-6
    max_position_embeddings: Annotated[int, Integer(1, MOST)] = 4096
    tie_embeddings: Annotated[bool, Flag()] = False
    dtype: Annotated[str, OneOf(DTYPES)] = "bfloat16"
    cache_dtype: Annotated[str | None, Nullable(OneOf(CACHE_DTYPES))] = None
    param_dtype: Annotated[str, OneOf(DTYPES)] = "bfloat16"

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_layers()
        self._check_widths()
        if self.cache_dtype == "uint8" and self.kv_lora_rank % BLOCK:
            raise ValueError(
                f"HybridConfig: cache_dtype 'uint8' needs a kv_lora_rank that is a multiple of "
                f"{BLOCK}, got {self.kv_lora_rank}; change it, or leave cache_dtype None"
            )
        if self.rope.dim != self.qk_rope_head_dim:
            raise ValueError(
                f"HybridConfig: rope.dim={self.rope.dim} must be "
                f"qk_rope_head_dim={self.qk_rope_head_dim}"
            )
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"HybridConfig: linear_num_value_heads={self.linear_num_value_heads} must be a "
                f"multiple of linear_num_key_heads={self.linear_num_key_heads}"
            )

    def _check_layers(self) -> None:
        layers = self.num_mla_layers + self.num_gdn_layers
        if layers > MOST_LAYERS:
            raise ValueError(
                f"HybridConfig: num_repeats={self.num_repeats:,} times 1 MLA and "
                f"gdn_per_repeat={self.gdn_per_repeat} GDN layers are {layers:,} layers; at most "
                f"{MOST_LAYERS:,} are supported"
            )

    def _check_widths(self) -> None:
        """Checks the widths of projections, in which all heads form one axis."""
        heads, values = self.num_attention_heads, self.linear_num_value_heads
        widths = {
            "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)": heads
            * (self.qk_nope_head_dim + self.qk_rope_head_dim),
            "num_attention_heads * (qk_nope_head_dim + v_head_dim)": heads
            * (self.qk_nope_head_dim + self.v_head_dim),
            "2 * (linear_num_key_heads * linear_key_head_dim + linear_num_value_heads * "
            "linear_value_head_dim)": self.conv_dim + values * self.linear_value_head_dim,
        }
        for words, width in widths.items():
            if width > MOST_WIDTH:
                raise ValueError(
                    f"HybridConfig: {words} must be at most {MOST_WIDTH:,}; got {width:,}"
                )

    @property
    def num_mla_layers(self) -> int:
        return self.num_repeats

    @property
    def num_gdn_layers(self) -> int:
        return self.num_repeats * self.gdn_per_repeat

    @property
    def latent_dim(self) -> int:
        """D = R + P, the number of elements cached per token in an MLA layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def latent_format(self) -> LatentFormat:
        """The format in which the cache stores latents."""
        dtype = self.cache_dtype or self.dtype
        return LatentFormat(dtype, self.kv_lora_rank, self.qk_rope_head_dim)

    @property
    def conv_dim(self) -> int:
        """Dc, the number of channels of a GDN layer's convolution."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for config.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverts `to_dict`.

        Raises:
            ValueError: A field is unknown, missing or does not fit; the message names it by its
                path, such as rope.yarn.factor.
        """
        return from_dict(cls, values)
