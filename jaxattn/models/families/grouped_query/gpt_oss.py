"""gpt-oss (`model_type` gpt_oss): attention with sinks and biases, and experts in every layer.

Every other layer has a window. The router and the experts have biases, and the experts' SwiGLU is
clamped. All experts of a layer are two tensors, with interleaved columns of gate and up, as floats
or in MXFP4.

Not supported: activations other than SiLU, other scalings of RoPE (`ConfigFields.rope`).
"""

import dataclasses
from collections.abc import Collection

from jaxattn.core.numerics.swiglu import ClampedSwiGLU
from jaxattn.models.blocks import GQA, Block, MoE
from jaxattn.models.families.components import decoder
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.gqa import (
    FULL,
    SLIDING,
    attention,
    read_plain,
    read_windows,
)
from jaxattn.models.families.grouped_query.qwen3 import skipped as skipped
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.encodings import FourBitEncoding, Mxfp4Encoding
from jaxattn.models.weight_map.tensor_mapping import (
    IDENTITY,
    LayerMapping,
    WeightMapping,
    ends,
    layer_places,
)
from jaxattn.models.weight_map.transforms import SplitInterleaved, TransposeExperts
from jaxattn.ops.moe.routing import Router

MODEL_TYPES = ("gpt_oss",)


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    fields.require_rope()
    fields = fields.renamed(num_local_experts="num_experts").assuming(
        attention_bias=True, head_dim=64, rope_theta=150000.0, rms_norm_eps=1e-5
    )
    fields.require("hidden_act", "silu")
    experts = MoE(
        expert_size=fields.integer("intermediate_size"),
        router=Router(
            experts=fields.experts("num_local_experts"),
            top_k=fields.integer("num_experts_per_tok"),
            scores="softmax",
            normalize=True,
        ),
        biases=True,
        activation=ClampedSwiGLU(
            alpha=fields.number("swiglu_alpha", 1.702), limit=fields.number("swiglu_limit", 7.0)
        ),
    )
    count = fields.integer("num_hidden_layers")
    windows = read_windows(fields, [(SLIDING, FULL)[layer % 2] for layer in range(count)])
    mixer = dataclasses.replace(read_plain(fields), sinks=True)
    mixers = {each: dataclasses.replace(mixer, window=each) for each in dict.fromkeys(windows)}
    return decoder.read_decoder(fields, tuple(Block(mixers[each], experts) for each in windows))


def placed(model: DecoderModel, names: Collection[str] = ()) -> list[WeightMapping]:
    """Returns the destination of every tensor, for any names in the folder."""
    spec = model.spec
    hidden, found = spec.stream.hidden_size, ends(spec)
    for place, block in zip(layer_places(spec), spec.blocks, strict=True):
        assert isinstance(block.mixer, GQA) and isinstance(block.feed_forward, MoE)
        found += decoder.norms(place, hidden) + attention(place, block.mixer, hidden)
        found += _experts(place, hidden, block.feed_forward)
    return found


def _experts(place: LayerMapping, hidden: int, moe: MoE) -> list[WeightMapping]:
    count, width = moe.router.experts, moe.expert_size
    tensors = (
        ("gate_up_proj", (count, hidden, 2 * width), "gate_up_proj", TransposeExperts(2)),
        ("gate_up_proj_bias", (count, 2 * width), "gate_up_bias", SplitInterleaved(2)),
        ("down_proj", (count, width, hidden), "down_proj", TransposeExperts()),
        ("down_proj_bias", (count, hidden), "down_bias", IDENTITY),
    )
    found = [
        place.plain(f"mlp.experts.{name}", shape, "mlp", key, transform=change)
        for name, shape, key, change in tensors
    ]
    if moe.form is not None and moe.form.kind == "mxfp4":
        for place_of, interleaved in ((0, 2), (2, 0)):
            tiles = FourBitEncoding(Mxfp4Encoding(), moe.form, interleaved)
            found[place_of] = dataclasses.replace(found[place_of], transform=IDENTITY, stored=tiles)
    return [
        place.matrix("mlp.router", count, hidden, "mlp", "router"),
        place.plain("mlp.router.bias", (count,), "mlp", "router_bias"),
        *found,
    ]
