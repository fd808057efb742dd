"""GLM-4.5, 4.6 and 4.7 (`model_type` glm4_moe): half-rotated heads, and DeepSeek's experts.

Queries, keys and values may have biases, and queries and keys norms. The first layers are dense.
Routing is DeepSeek-V3's, and so is the prediction layer (MTP) after the last layer.

Not supported: activations other than SiLU, other scalings of RoPE (`ConfigFields.rope`), routing
other than by sigmoid with a correction bias.
"""

from collections.abc import Collection

from jaxattn.models.blocks import GQA, MLP, Block, FeedForward
from jaxattn.models.families import deepseek
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.decoder import read_decoder
from jaxattn.models.families.components.gqa import head_dim
from jaxattn.models.families.grouped_query import qwen3_moe
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.tensor_mapping import WeightMapping

MODEL_TYPES = ("glm4_moe",)

skipped, with_draft_head = deepseek.skipped, deepseek.with_draft_head


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    fields = fields.assuming(rms_norm_eps=1e-5)
    fields.require("hidden_act", "silu")
    dim = head_dim(fields)
    attention = GQA(
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=dim,
        rope=fields.rope(fields.rotated(dim, 0.5), interleaved=False),
        qk_norm=fields.flag("use_qk_norm", False),
        biases=fields.flag("attention_bias", False),
    )
    dense = deepseek.dense_layers(fields)
    kinds: dict[bool, FeedForward] = {}
    if any(dense):
        kinds[True] = MLP(intermediate_size=fields.integer("intermediate_size"))
    if not all(dense):
        kinds[False] = deepseek.read_experts(fields)
    return read_decoder(fields, tuple(Block(attention, kinds[each]) for each in dense))


def placed(model: DecoderModel, names: Collection[str] = ()) -> list[WeightMapping]:
    """Returns the destination of every tensor, in the spelling of a folder's `names`."""
    return qwen3_moe.placed(model, names) + deepseek.draft_layers(model.spec)
