"""Sharding of a decoder over GPUs: its layers, and their parameters.

    divided(model, parallel)      the model that one GPU runs (decoder.py)
    AxisSharding                  a GPU's part of one parameter (axis_sharding.py)

Each family of layers has one file, which defines both for its layers.
"""

from jaxattn.models.sharding.attention import divided_gqa as divided_gqa
from jaxattn.models.sharding.attention import divided_mla as divided_mla
from jaxattn.models.sharding.axis_sharding import AxisSharding as AxisSharding
from jaxattn.models.sharding.decoder import cuts_of as cuts_of
from jaxattn.models.sharding.decoder import divided as divided
from jaxattn.models.sharding.decoder import layouts as layouts
from jaxattn.models.sharding.delta_rule import divided_gdn as divided_gdn
from jaxattn.models.sharding.feed_forward import divided_mlp as divided_mlp
from jaxattn.models.sharding.feed_forward import divided_moe as divided_moe
