"""The hybrid decoder's configuration, in DeepSeek-V3's names (MLA) and Qwen3-Next's (linear_*)."""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp

from jaxattn.core.formats import LatentFormat
from jaxattn.core.rope import RopeConfig, YarnConfig

DTYPES = ("bfloat16", "float32")
CACHE_DTYPES = (None, "uint8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """`num_repeats` times `gdn_per_repeat` GDN layers and one MLA layer, each with a gated MLP.

    Attributes:
        intermediate_size: width of the MLPs.
        num_attention_heads .. v_head_dim: the MLA layers. `q_lora_rank` None projects queries
            directly.
        linear_*: the GDN layers. Value head h uses key head h // (value heads // key heads).
        max_position_embeddings: longest row in tokens. Nothing is allocated by it.
        tie_embeddings: the output head is the embedding, transposed.
        dtype: operands of the matrix products, and convolution state. The residual stream, the
            norms, the gates and the recurrent state are float32 in any case.
        cache_dtype: of the latent cache: None is `dtype`, "uint8" is block-scaled FP8, 656 bytes
            a token for 512 + 64 (`jaxattn.mla.LatentFormat`).
        param_dtype: what the weights are stored in.

    Raises:
        ValueError: a field does not fit; the message names it and its value.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_repeats: int
    gdn_per_repeat: int = 3
    num_attention_heads: int
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope: RopeConfig = RopeConfig(dim=64)
    linear_num_key_heads: int = 1
    linear_num_value_heads: int = 1
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    tie_embeddings: bool = False
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    param_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int or (field.name == "q_lora_rank" and value is not None):
                least = {"gdn_per_repeat": 0, "linear_conv_kernel_dim": 2}.get(field.name, 1)
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise ValueError(
                        f"{field.name} must be an integer of at least {least}; got {value!r}"
                    )
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"{name} must be one of {DTYPES}; got {getattr(self, name)!r}")
        if self.cache_dtype not in CACHE_DTYPES:
            raise ValueError(f"cache_dtype must be one of {CACHE_DTYPES}; got {self.cache_dtype!r}")
        _ = self.latent_format  # it says which dims it cannot store
        if not isinstance(self.rms_norm_eps, float) or self.rms_norm_eps <= 0:
            raise ValueError(f"rms_norm_eps must be a positive float; got {self.rms_norm_eps!r}")
        if not isinstance(self.tie_embeddings, bool):
            raise ValueError(f"tie_embeddings must be true or false; got {self.tie_embeddings!r}")
        if not isinstance(self.rope, RopeConfig):
            raise ValueError(f"rope must be a RopeConfig; got {self.rope!r}")
        if self.rope.dim != self.qk_rope_head_dim:
            raise ValueError(
                f"rope.dim={self.rope.dim} must be qk_rope_head_dim={self.qk_rope_head_dim}"
            )
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads={self.linear_num_value_heads} must be a multiple of "
                f"linear_num_key_heads={self.linear_num_key_heads}"
            )

    @property
    def num_mla_layers(self) -> int:
        return self.num_repeats

    @property
    def num_gdn_layers(self) -> int:
        return self.num_repeats * self.gdn_per_repeat

    @property
    def latent_dim(self) -> int:
        """D = R + P: numbers cached for a token in an MLA layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def latent_format(self) -> LatentFormat:
        """How they are stored."""
        dtype = self.cache_dtype or self.dtype
        return LatentFormat(dtype, self.kv_lora_rank, self.qk_rope_head_dim)

    @property
    def conv_dim(self) -> int:
        """Dc: channels of a GDN layer's convolution."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for config.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a field is unknown, missing or does not fit.
        """
        values = dict(values)
        if "rope" in values:
            values["rope"] = _nested(RopeConfig, values["rope"], "rope")
        return _construct(cls, values, "")


def _nested(cls: type, values: Any, path: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(
            f"{path} must be an object with the fields of {cls.__name__}; got {values!r}"
        )
    values = dict(values)
    if values.get("yarn") is not None:
        values["yarn"] = _nested(YarnConfig, values["yarn"], f"{path}.yarn")
    return _construct(cls, values, f"{path}.")


def _construct(cls: Any, values: dict[str, Any], prefix: str) -> Any:
    fields = dataclasses.fields(cls)
    unknown = sorted(values.keys() - {field.name for field in fields})
    if unknown:
        raise ValueError(f"unknown field {prefix}{unknown[0]}")
    for field in fields:
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and field.name not in values:
            raise ValueError(f"missing field {prefix}{field.name}")
    return cls(**values)
