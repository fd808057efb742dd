"""Flax NNX modules for your own model. Each module trains, prefills and decodes."""

from jaxattn.nn.attention.gqa import GroupedQueryAttention as GroupedQueryAttention
from jaxattn.nn.attention.mla import MultiHeadLatentAttention as MultiHeadLatentAttention
from jaxattn.nn.attention.sparse_mla import (
    SparseMultiHeadLatentAttention as SparseMultiHeadLatentAttention,
)
from jaxattn.nn.attention.token_indexer import IndexPages as IndexPages
from jaxattn.nn.attention.turboquant import TurboQuantAttention as TurboQuantAttention
from jaxattn.nn.fp8_linear import Fp8Linear as Fp8Linear
from jaxattn.nn.linear import Linear as Linear
from jaxattn.nn.linear_attention.gdn import GatedDeltaNet as GatedDeltaNet
from jaxattn.nn.linear_attention.kda import KimiDeltaAttention as KimiDeltaAttention
from jaxattn.nn.mlp import GatedMLP as GatedMLP
from jaxattn.nn.moe import MixtureOfExperts as MixtureOfExperts
from jaxattn.nn.norm import LayerNorm as LayerNorm
from jaxattn.nn.norm import RMSNorm as RMSNorm
from jaxattn.nn.token_logprobs import token_logprobs as token_logprobs
