"""The blocks that decoders are built of: each mixer and feed-forward, and what they have in common.

Block(MLA(num_heads=16, ...), MoE(expert_size=1408, router=Router(...)))
"""

from jaxattn.models.block import Block as Block
from jaxattn.models.block import FeedForward as FeedForward
from jaxattn.models.block import Mixer as Mixer
from jaxattn.models.block import Stream as Stream
from jaxattn.models.delta_mixers import GDN as GDN
from jaxattn.models.delta_mixers import KDA as KDA
from jaxattn.models.delta_mixers import DeltaMixer as DeltaMixer
from jaxattn.models.feed_forwards import MLP as MLP
from jaxattn.models.feed_forwards import MoE as MoE
from jaxattn.models.gqa_mixer import GQA as GQA
from jaxattn.models.mla_mixer import MLA as MLA
