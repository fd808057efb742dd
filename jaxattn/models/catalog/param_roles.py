"""Roles of a decoder's parameters in a plan, by their place in the tree.

    ("segments", 1, "layers", 0, "mixer", "q_b_proj", "weight")    MLA, by heads
    ("segments", 1, "layers", 0, "mlp", "down_proj")               experts, whole ones
    ("embedding",)                                                 embedding, by vocabulary

This is the only such table: plans take from it their lines and the shares of the GPUs.
"""

import dataclasses
import math
from typing import Any, Literal

from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.models.blocks import MoE
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.network.decoder_spec import DecoderSpec
from jaxattn.nn.four_bit_linear import FourBitLinears

# The key of a parameter in `nnx.to_flat_state`.
type Path = tuple[Any, ...]
# "experts": each GPU holds whole experts. "attention": by heads, and "dense": by columns, rows or
# vocabulary, if those are tensor-parallel. "all": on every GPU.
type Split = Literal["experts", "attention", "dense", "all"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamRole:
    """The role of a parameter.

    Attributes:
        line: Line of the plan.
        split: How GPUs divide it.
        stacked: Number of leading axes that count layers or experts.
        published_fp8: Whether an FP8 checkpoint stores it in FP8.
        scales: Whether it holds scales of quantized numbers.
        always: Number of shared experts, the last of a stack, which every token uses.
        form: Format of 4-bit numbers in tiles, or None.
    """

    line: str
    split: Split
    stacked: int = 0
    published_fp8: bool = False
    scales: bool = False
    always: int = 0
    form: FourBitFormat | None = None

    def numbers(self, shape: tuple[int, ...]) -> int:
        """Returns the number of elements of such a parameter, without scales in its tiles."""
        if self.form is None:
            return math.prod(shape)
        return math.prod(shape[:-3]) * math.prod(self.form.matrix(shape))


# Parameters of mixers that are divided by heads; latents and low-rank queries have no heads.
_BY_HEADS = (
    "q_proj", "q_b_proj", "w_uk", "w_uv", "o_proj", "k_proj", "v_proj", "sinks",
    "in_proj_qkvz", "in_proj_ba", "conv1d", "A_log", "dt_bias", "out_proj",
    "in_proj_qkv", "in_proj_b", "in_proj_fg", "f_b_proj", "g_b_proj", "g_proj",
    "kv_scale", "q_bias", "k_bias", "v_bias", "q_heads_norm", "k_heads_norm",
)  # fmt: skip
_WHOLE = (
    "q_a_proj", "q_a_norm", "kv_a_proj", "kv_a_norm", "q_norm", "k_norm", "norm", "in_proj_fg_a",
    "o_bias",
)  # fmt: skip
# Parameters that FP8 checkpoints store in bfloat16.
_NEVER_FP8 = (
    "in_proj_ba",
    "in_proj_b",
    "g_proj",
    "conv1d",
    "A_log",
    "dt_bias",
    "q_a_norm",
    "kv_a_norm",
    "q_norm",
    "k_norm",
    "norm",
    "sinks",
    "kv_scale",
    "q_bias",
    "k_bias",
    "v_bias",
    "o_bias",
    "q_heads_norm",
    "k_heads_norm",
)
_FP8_OF_INDEXER = ("wq_b", "wk")
_MLP = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = ("gate_up_proj", "down_proj")
_SCALES = ("gate_up_scale", "down_scale")
_BIASES = ("gate_up_bias", "down_bias")
_SCALE = "scale"  # of a linear's FP8 weight


def param_role(spec: DecoderSpec, key: Path) -> ParamRole:
    """Returns the role of the parameter at `key` of a decoder's state.

    Raises:
        ValueError: The table does not contain it.
    """
    match key:
        case ("embedding",):
            return ParamRole(line="embedding", split="dense")
        case ("lm_head", "weight"):
            return ParamRole(line="head", split="dense")
        case ("norm", "weight"):
            return ParamRole(line="norms", split="all")
        case ("draft_layers", "projection", "weight"):
            return ParamRole(line="draft head", split="all")
        case ("draft_layers", _, "weight"):
            return ParamRole(line="norms", split="all")
        case ("segments", int(), "layers", int(), "norm" | "mlp_norm", "weight"):
            return ParamRole(line="norms", split="all", stacked=1)
        case ("segments", int(), "layers", int(), "mixer", "indexer", str(name), str(leaf)):
            fp8 = name in _FP8_OF_INDEXER and leaf != _SCALE
            return ParamRole(
                line="indexer", split="all", stacked=1, published_fp8=fp8, scales=leaf == _SCALE
            )
        case ("segments", int(number), "layers", int(place), "mixer", str(name), *_):
            mixer = spec.segments[number].pattern[place].mixer
            line = type(mixer).__name__
            scales = key[-1] == _SCALE
            fp8 = name not in _NEVER_FP8 and not scales
            split: Split | None = "attention" if name in _BY_HEADS else None
            split = "all" if name in _WHOLE else split
            if split is not None:
                return ParamRole(
                    line=line, split=split, stacked=1, published_fp8=fp8, scales=scales,
                    form=_form_of(mixer.fp8, name),
                )  # fmt: skip
        case ("segments", int(number), "layers", int(place), "mlp", *rest):
            kind = spec.segments[number].pattern[place].feed_forward
            if isinstance(kind, MoE):
                found = _of_experts(tuple(rest), kind)
            else:
                found = _of_mlp(tuple(rest), "dense MLP")
            if found is not None:
                form = _form_of(kind.fp8, ".".join(map(str, rest[:-1])))
                return found if form is None else dataclasses.replace(found, form=form)
    raise ValueError(
        f"there is no sharding rule for the parameter {'.'.join(map(str, key))!r}; add one to "
        "jaxattn/models/catalog/param_roles.py"
    )


def _form_of(names: tuple[str, ...] | FourBitLinears, name: str) -> FourBitFormat | None:
    return names.form if isinstance(names, FourBitLinears) and name in names else None


def _of_mlp(path: Path, line: str) -> ParamRole | None:
    if path[0] in _MLP:
        scales = path[-1] == _SCALE
        return ParamRole(
            line=line, split="dense", stacked=1, published_fp8=not scales, scales=scales
        )
    return None


def _of_experts(path: Path, kind: MoE) -> ParamRole | None:
    match path:
        case ("shared", *rest):
            return _of_mlp(tuple(rest), "shared experts")
        case ("router" | "router_bias" | "correction_bias" | "shared_gate",):
            return ParamRole(line="router", split="all", stacked=1)
        case (str(name),) if name in (*_EXPERTS, *_SCALES, *_BIASES):
            scales = name in _SCALES
            return ParamRole(
                line="experts",
                split="experts",
                stacked=2,
                published_fp8=name in _EXPERTS,
                scales=scales,
                always=kind.always,
                form=kind.form if name in _EXPERTS else None,
            )
    return None


def with_local_heads(
    model: DecoderModel, num_shards: int, cache_dtype: str | None = None
) -> DecoderModel:
    """Returns the model with the mixers of one of `num_shards` GPUs: fewer heads, each whole.

    Each GPU has all heads of an indexer. Caches and scratch of the result are those of one GPU.

    Args:
        num_shards: Number of GPUs that divide the heads; if there are fewer heads, each GPU has
            one.
        cache_dtype: Dtype of the pages. None keeps the model's.
    """
    if num_shards == 1 and cache_dtype is None:
        return model
    changed = {}
    for mixer in model.spec.mixers.values():
        fields = {field.name for field in dataclasses.fields(mixer)}
        heads = {n for n in fields if n.endswith("_heads") and n != "index_heads"}
        changes: dict[str, Any] = {name: -(-getattr(mixer, name) // num_shards) for name in heads}
        if cache_dtype is not None and "cache_dtype" in fields:
            changes["cache_dtype"] = cache_dtype
        changed[mixer] = dataclasses.replace(mixer, **changes)
    blocks = tuple(dataclasses.replace(b, mixer=changed[b.mixer]) for b in model.spec.blocks)
    return DecoderModel(dataclasses.replace(model.spec, blocks=blocks), model.tokens)
