"""Sharding of a decoder over GPUs: its layers, and their parameters.

    divided(model, parallel)      the model that one GPU runs (decoder.py)
    AxisSharding                  a GPU's part of one parameter (axis_sharding.py)

Each family of layers has one file, which defines both for its layers.
"""

from jaxattn.models.sharding.attention import shard_gqa as shard_gqa
from jaxattn.models.sharding.attention import shard_mla as shard_mla
from jaxattn.models.sharding.axis_sharding import AxisSharding as AxisSharding
from jaxattn.models.sharding.decoder import cuts_of as cuts_of
from jaxattn.models.sharding.decoder import divided as divided
from jaxattn.models.sharding.decoder import layouts as layouts
from jaxattn.models.sharding.delta_rule import shard_gdn as shard_gdn
from jaxattn.models.sharding.feed_forward import shard_mlp as shard_mlp
from jaxattn.models.sharding.feed_forward import shard_moe as shard_moe
