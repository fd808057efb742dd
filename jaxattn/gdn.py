"""Gated delta rule: chunked prefill and training, token recurrence, decode on a state pool.

For each value head, with log decay `g_t`, writing strength `beta_t` and state `S` of `[Dv, Dk]`:

    S   <- exp(g_t) S
    S   <- S + beta_t (v_t - S k_t) k_t^T
    o_t  = scale * S q_t

The state is always value-first, `[..., Hv, Dv, Dk]`, as in vLLM, SGLang and FlashInfer (FLA's
`state_v_first=True`). The ops compute with float32 states; a pool may store them in bfloat16. The
decode kernel divides a state into tiles of whole rows. Tiles of columns would take as long in
float32, and up to 7% longer in bfloat16 (benchmarks/LOG.md). Value head h uses key head
`h // (Hv // Hk)`.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024). Qwen3-Next and Qwen3.5 use this
rule.
"""

from jaxattn.core.cache.state_pool import state_read as state_read
from jaxattn.core.cache.state_pool import state_write as state_write
from jaxattn.kernels.gdn.decode.launch import scratch as scratch
from jaxattn.ops.gdn.causal_conv1d import causal_conv1d as causal_conv1d
from jaxattn.ops.gdn.causal_conv1d import causal_conv1d_update as causal_conv1d_update
from jaxattn.ops.gdn.chunk import chunk_gated_delta_rule as chunk_gated_delta_rule
from jaxattn.ops.gdn.decode import gated_delta_rule_decode as gated_delta_rule_decode
from jaxattn.ops.gdn.layer_decode import gated_delta_net_decode as gated_delta_net_decode
from jaxattn.ops.gdn.layer_decode import pack_gdn_weights as pack_gdn_weights
from jaxattn.ops.gdn.prefill import gated_delta_rule_prefill as gated_delta_rule_prefill
from jaxattn.ops.gdn.prefill_options import Checkpoints as Checkpoints
from jaxattn.ops.gdn.prefill_options import OutputNorm as OutputNorm
from jaxattn.ops.gdn.recurrent import gdn_gates as gdn_gates
from jaxattn.ops.gdn.recurrent import recurrent_gated_delta_rule as recurrent_gated_delta_rule
