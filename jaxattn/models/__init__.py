"""Models: the interface to the engine, decoders built of blocks, configurations and checkpoints."""

from jaxattn.models.caches.layer_cache import CacheSize as CacheSize
from jaxattn.models.caches.layer_cache import DecodeState as DecodeState
from jaxattn.models.caches.layer_cache import LayerCache as LayerCache
from jaxattn.models.embedded.hybrid_config import HybridConfig as HybridConfig
from jaxattn.models.embedded.hybrid_model import Hybrid as Hybrid
from jaxattn.models.interface import DecodeBatch as DecodeBatch
from jaxattn.models.interface import Model as Model
from jaxattn.models.interface import PrefillBatch as PrefillBatch
from jaxattn.models.loading.loader import load as load
from jaxattn.models.network.decoder_model import DecoderModel as DecoderModel
from jaxattn.models.network.decoder_spec import DecoderSpec as DecoderSpec
from jaxattn.models.sharding import divided as divided
