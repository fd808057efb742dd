"""Grouped-query attention (arXiv 2305.13245) over a paged cache of keys and values.

Query head h uses key-value head h // (H // Hk). One layer of a model, after its projections, norms
and RoPE:

    kv_cache = gqa_cache_write(kv_cache, k, v, block_tables, seq_lens, layer=layer)
    out, lse = gqa_decode(q, kv_cache, block_tables, seq_lens, layer=layer)

    q [B, S, H, D]   k, v [B, S, Hk, D]   kv_cache [L, N, 2, C, Hk, D], keys at 0, values at 1

The token of row b at position t is in page block_tables[b, t // C], at t % C. A cache is one
layer's pages [N, 2, C, Hk, D], or a stack [L, N, 2, C, Hk, D] with `layer`, which the ops never
slice.

A TurboQuant cache has pages of bytes in a `TurboFormat`, and separate ops:

    kv_cache = turbo_cache_write(kv_cache, k, v, block_tables, seq_lens, form=form, layer=layer)
    out, lse = turbo_attention(q, kv_cache, block_tables, seq_lens, form=form, layer=layer)

    kv_cache uint8 [L, N, Hk, C * form.slot_bytes]
"""

from jaxattn.core.cache.formats import KVFormat as KVFormat
from jaxattn.core.turboquant.codec import TurboFormat as TurboFormat
from jaxattn.kernels.gqa.decode.split_kv.decode_schedule import PairSchedule as PairSchedule
from jaxattn.kernels.gqa.decode.split_kv.decode_schedule import decode_schedule as decode_schedule
from jaxattn.kernels.gqa.decode.split_kv.workspace import scratch as scratch
from jaxattn.ops.gqa.append import gqa_append as gqa_append
from jaxattn.ops.gqa.append import pack_gqa_weights as pack_gqa_weights
from jaxattn.ops.gqa.cache_write import gqa_cache_write as gqa_cache_write
from jaxattn.ops.gqa.decode import gqa_decode as gqa_decode
from jaxattn.ops.gqa.prefill import gqa_attention as gqa_attention
from jaxattn.ops.gqa.prefill import gqa_prefill as gqa_prefill
from jaxattn.ops.turboquant.append import turbo_append as turbo_append
from jaxattn.ops.turboquant.attention import turbo_attention as turbo_attention
from jaxattn.ops.turboquant.cache_write import turbo_cache_write as turbo_cache_write
from jaxattn.ops.turboquant.vllm_import import import_vllm_slots as import_vllm_slots
