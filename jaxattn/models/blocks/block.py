"""A decoder's block: a mixer of tokens and a feed-forward, each with its norm.

A `Block` is a description, which equals every block that computes the same. A list of blocks is a
model (`network/decoder_spec.py`).
"""

import dataclasses

from jaxattn.models.blocks.feed_forward import FeedForward
from jaxattn.models.blocks.mixer import Mixer


@dataclasses.dataclass(frozen=True)
class Block:
    """One layer: norm, mixer, norm and feed-forward on a float32 residual stream.

    Attributes:
        norms_after: Whether the norms apply to the outputs of mixer and feed-forward instead of
            their inputs (OLMo 2).
    """

    mixer: Mixer
    feed_forward: FeedForward
    norms_after: bool = False
