"""MLA decode and gated delta rule kernels for JAX on NVIDIA Hopper.

The dimension key of every signature:

    B batch rows   S query tokens of a row (>= 1)   T tokens   H query heads
    R kv_lora_rank (512)   P qk_rope_head_dim (64)   D = R + P   Ds what is stored of it: D, or
        the bytes of a block-scaled latent (656)
    N pages   C page size   M block-table width   L layers   Z state slots
    Hk, Hv key and value heads of the delta rule   Dk, Dv their head dims (128)
    W convolution width   Dc = 2 * Hk * Dk + Hv * Dv convolution channels
"""
# ruff: noqa: E402

from jaxattn import interrupt

interrupt.guard_command()  # before the lines below import JAX

from jaxattn.aliasing.checker import AliasingError as AliasingError
from jaxattn.aliasing.checker import check_aliasing as check_aliasing
from jaxattn.arena import Arena as Arena
from jaxattn.arena import ArenaError as ArenaError
from jaxattn.arena import ArenaSpec as ArenaSpec
from jaxattn.core import moved_modules
from jaxattn.core.cache.formats import LatentFormat as LatentFormat
from jaxattn.core.numerics.rope import RopeConfig as RopeConfig
from jaxattn.core.numerics.rope import YarnConfig as YarnConfig
from jaxattn.core.numerics.rope import rotation as rotation
from jaxattn.core.numerics.rope import softmax_scale as softmax_scale
from jaxattn.engine.engine import Engine as Engine
from jaxattn.engine.requests.outputs import Completion as Completion
from jaxattn.engine.requests.outputs import logprob_array as logprob_array
from jaxattn.engine.requests.request import Request as Request
from jaxattn.memory.engine_limits import Limits as Limits
from jaxattn.ops.gdn.causal_conv1d import causal_conv1d as causal_conv1d
from jaxattn.ops.gdn.causal_conv1d import causal_conv1d_update as causal_conv1d_update
from jaxattn.ops.gdn.chunk import chunk_gated_delta_rule as chunk_gated_delta_rule
from jaxattn.ops.gdn.decode import gated_delta_rule_decode as gated_delta_rule_decode
from jaxattn.ops.gdn.layer_decode import gated_delta_net_decode as gated_delta_net_decode
from jaxattn.ops.gdn.layer_decode import pack_gdn_weights as pack_gdn_weights
from jaxattn.ops.gdn.prefill import gated_delta_rule_prefill as gated_delta_rule_prefill
from jaxattn.ops.gdn.recurrent import gdn_gates as gdn_gates
from jaxattn.ops.gdn.recurrent import recurrent_gated_delta_rule as recurrent_gated_delta_rule
from jaxattn.ops.mla.absorption import absorb_output as absorb_output
from jaxattn.ops.mla.absorption import absorb_query as absorb_query
from jaxattn.ops.mla.append import mla_append as mla_append
from jaxattn.ops.mla.append import pack_mla_weights as pack_mla_weights
from jaxattn.ops.mla.cache_write import mla_cache_write as mla_cache_write
from jaxattn.ops.mla.decode import mla_decode as mla_decode
from jaxattn.ops.mla.prefill import mla_prefill as mla_prefill
from jaxattn.ops.mla.state_merge import merge_attention_states as merge_attention_states
from jaxattn.parallel import Parallel as Parallel

moved_modules.install()

__version__ = "0.1.0"
