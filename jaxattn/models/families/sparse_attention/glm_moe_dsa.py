"""GLM-5 to GLM-5.3 (`model_type` glm_moe_dsa): DeepSeek Sparse Attention with shared choices.

Heads have keys of 192 + 64 dims and values of 256, as in GLM-4.7-Flash. A layer without an indexer
attends to the tokens that the last layer with one has chosen. `indexer_types` names each layer
"full" or "shared". Without it `index_topk_pattern` does, with letters F and S. Otherwise every
`index_topk_freq`-th layer is full, counted from `index_skip_topk_offset` on.

Not supported: everything that DeepSeek-V3.2 does not support, and a first layer without an indexer.
"""

from jaxattn.models.families import deepseek
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.decoder import read_decoder
from jaxattn.models.families.sparse_attention import deepseek_v32
from jaxattn.models.network.decoder_model import DecoderModel

MODEL_TYPES = ("glm_moe_dsa",)
LETTERS = {"F": "full", "S": "shared"}

placed, skipped = deepseek.placed, deepseek.skipped
with_draft_head = deepseek_v32.with_draft_head


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    fields = fields.assuming(routed_scaling_factor=2.5, rms_norm_eps=1e-5)
    blocks = deepseek_v32.read_blocks(fields, indexed_layers(fields), interleaved=True)
    return read_decoder(fields, blocks)


def indexed_layers(fields: ConfigFields) -> list[bool]:
    """Returns whether each layer has an indexer."""
    layers, name = fields.integer("num_hidden_layers"), "indexer_types"
    if fields.values.get(name) is None:
        name = "index_topk_pattern"
    given = fields.values.get(name)
    if given is None:
        every = fields.integer("index_topk_freq", 1, minimum=0) or 1
        # If not all layers have an indexer, the first one must: no layer before it can choose for
        # it.
        first = fields.integer("index_skip_topk_offset", 2, minimum=min(every - 1, 1))
        found = [max(layer - first + 1, 0) % every == 0 for layer in range(layers)]
    else:
        letters = isinstance(given, str)
        spelled = [LETTERS.get(letter, letter) for letter in given] if letters else given
        read = ConfigFields({name: spelled}, fields.where)
        found = [word == "full" for word in read.words(name, layers, "full", "shared")]
    if not found[0]:
        raise fields.refused(name, "must begin with a layer that has an indexer")
    return found
