"""Models: what the engine asks of one (base), decoders of blocks, configurations, checkpoints."""

from jaxattn.models.base import DecodeBatch as DecodeBatch
from jaxattn.models.base import Model as Model
from jaxattn.models.base import PrefillBatch as PrefillBatch
from jaxattn.models.config import HybridConfig as HybridConfig
from jaxattn.models.decoder import DecoderModel as DecoderModel
from jaxattn.models.decoder_spec import DecoderSpec as DecoderSpec
from jaxattn.models.hybrid import Hybrid as Hybrid
from jaxattn.models.layer_cache import CacheSize as CacheSize
from jaxattn.models.layer_cache import DecodeState as DecodeState
from jaxattn.models.layer_cache import LayerCache as LayerCache
from jaxattn.models.loading import load as load
from jaxattn.models.sharding import divided as divided
