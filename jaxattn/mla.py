"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a paged cache.

The cache stores one latent [D = R + P] per token: R dims for the keys and values of all heads, and
P rotated dims that all heads share. Decode attends to the latents directly (with absorbed weights),
and prefill expands them. One layer of a model, after its projections, norms and RoPE:

    latent  [B, S, D]     concatenate([norm(c_kv), rope(k_pe)], -1)
    kv_cache = mla_cache_write(kv_cache, latent, block_tables, seq_lens, layer=layer)
    q       [B, S, H, D]  concatenate([absorb_query(q_nope, w_uk), rope(q_pe)], -1)
    out, lse = mla_decode(q, kv_cache, block_tables, seq_lens, scale=scale, layer=layer)
    values  [B, S, H, Dv] absorb_output(out, w_uv)

DeepSeek Sparse Attention chooses the tokens that a query attends to. `mla_index_write` caches an
index key for each latent, and `mla_index` finds the `top_k` positions of a query.
`mla_sparse_decode` and `mla_sparse_prefill` attend to these positions.

The token of row b at position t is in page block_tables[b, t // C], at t % C. A cache is one
layer's pages [N, C, Ds], or a stack [L, N, C, Ds] with `layer`, which the ops never slice. Ds is D,
or the bytes of a block-scaled latent (`LatentFormat`).
"""

from jaxattn.core import deprecation as _deprecation
from jaxattn.core.cache.formats import LatentFormat as LatentFormat
from jaxattn.kernels.attention.split_kv_schedule import Schedule as Schedule
from jaxattn.kernels.mla.decode.arguments import ContextParallelMerge as ContextParallelMerge
from jaxattn.kernels.mla.decode.decode_schedule import decode_schedule as decode_schedule
from jaxattn.kernels.mla.decode.workspace import scratch as scratch
from jaxattn.ops.mla.absorption import absorb_output as absorb_output
from jaxattn.ops.mla.absorption import absorb_query as absorb_query
from jaxattn.ops.mla.append import mla_append as mla_append
from jaxattn.ops.mla.append import pack_mla_weights as pack_mla_weights
from jaxattn.ops.mla.cache_write import mla_cache_write as mla_cache_write
from jaxattn.ops.mla.context_parallel_decode import (
    mla_decode_context_parallel as mla_decode_context_parallel,
)
from jaxattn.ops.mla.context_parallel_decode import mla_decode_met as mla_decode_met
from jaxattn.ops.mla.decode import mla_decode as mla_decode
from jaxattn.ops.mla.merge_buffer import merge_buffer_shape as merge_buffer_shape
from jaxattn.ops.mla.prefill import causal_attention as causal_attention
from jaxattn.ops.mla.prefill import mla_prefill as mla_prefill
from jaxattn.ops.mla.sparse.attend import mla_sparse_decode as mla_sparse_decode
from jaxattn.ops.mla.sparse.attend import mla_sparse_prefill as mla_sparse_prefill
from jaxattn.ops.mla.sparse.attend import sparse_scratch as sparse_scratch
from jaxattn.ops.mla.sparse.index import mla_index as mla_index
from jaxattn.ops.mla.sparse.index_cache_write import mla_index_write as mla_index_write
from jaxattn.ops.mla.state_merge import merge_attention_states as merge_attention_states

__getattr__ = _deprecation.renamed_names(
    __name__, {"Meeting": "ContextParallelMerge", "meeting_room": "merge_buffer_shape"}
)
