"""Flax NNX modules: import them into your own model. Each trains, prefills and decodes."""

from jaxattn.nn.gdn import GatedDeltaNet as GatedDeltaNet
from jaxattn.nn.gqa import GroupedQueryAttention as GroupedQueryAttention
from jaxattn.nn.gqa_turbo import TurboQuantAttention as TurboQuantAttention
from jaxattn.nn.kda import KimiDeltaAttention as KimiDeltaAttention
from jaxattn.nn.linear import Linear as Linear
from jaxattn.nn.linear_fp8 import Fp8Linear as Fp8Linear
from jaxattn.nn.mla import MultiHeadLatentAttention as MultiHeadLatentAttention
from jaxattn.nn.mlp import GatedMLP as GatedMLP
from jaxattn.nn.moe import MixtureOfExperts as MixtureOfExperts
from jaxattn.nn.norm import RMSNorm as RMSNorm
