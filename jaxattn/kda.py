"""Kimi Delta Attention: chunked prefill and training, token recurrence, decode on a state pool.

Kimi Delta Attention is the gated delta rule (`jaxattn.gdn`) with a vector as its decay. For each
head, with log decays `g_t` of `[Dk]`, writing strength `beta_t` and state `S` of `[Dv, Dk]`:

    S   <- S diag(exp(g_t))
    S   <- S + beta_t (v_t - S k_t) k_t^T
    o_t  = scale * S q_t

States, slots, packed sequences, checkpoints and padding are as in `jaxattn.gdn`.

Source: Kimi Linear (2025). Kimi-Linear-48B and Ling-3.0 use this rule.
"""

from jaxattn.core.cache.state_pool import state_read as state_read
from jaxattn.core.cache.state_pool import state_write as state_write
from jaxattn.kernels.gdn.decode.launch import scratch as scratch
from jaxattn.ops.gdn.causal_conv1d import causal_conv1d as causal_conv1d
from jaxattn.ops.gdn.causal_conv1d import causal_conv1d_update as causal_conv1d_update
from jaxattn.ops.gdn.prefill_options import Checkpoints as Checkpoints
from jaxattn.ops.gdn.prefill_options import OutputNorm as OutputNorm
from jaxattn.ops.kda.chunk import chunk_kda as chunk_kda
from jaxattn.ops.kda.decode import kda_decode as kda_decode
from jaxattn.ops.kda.gates import kda_gates as kda_gates
from jaxattn.ops.kda.layer_decode import kimi_delta_attention_decode as kimi_delta_attention_decode
from jaxattn.ops.kda.layer_decode import pack_kda_weights as pack_kda_weights
from jaxattn.ops.kda.prefill import kda_prefill as kda_prefill
from jaxattn.ops.kda.recurrent import recurrent_kda as recurrent_kda
