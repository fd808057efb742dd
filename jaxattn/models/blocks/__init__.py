"""The blocks of which decoders are built: mixers, feed-forwards, and their interfaces.

Block(MLA(num_heads=16, ...), MoE(expert_size=1408, router=Router(...)))
"""

from jaxattn.models.blocks.block import Block as Block
from jaxattn.models.blocks.delta_rule import GDN as GDN
from jaxattn.models.blocks.delta_rule import KDA as KDA
from jaxattn.models.blocks.delta_rule import DeltaMixer as DeltaMixer
from jaxattn.models.blocks.feed_forward import MLP as MLP
from jaxattn.models.blocks.feed_forward import FeedForward as FeedForward
from jaxattn.models.blocks.feed_forward import MoE as MoE
from jaxattn.models.blocks.gqa import GQA as GQA
from jaxattn.models.blocks.mixer import Mixer as Mixer
from jaxattn.models.blocks.mixer import Stream as Stream
from jaxattn.models.blocks.mla import MLA as MLA
from jaxattn.models.blocks.sparse_mla import SparseMLA as SparseMLA
