"""Kernels for attention, delta rules and mixtures of experts in JAX on NVIDIA Hopper GPUs.

The package also provides Flax modules, an engine that serves models, and memory plans. Signatures
use these names of dimensions:

    B batch rows   S query tokens of a row (>= 1)   T tokens   H query heads
    R kv_lora_rank (512)   P qk_rope_head_dim (64)   D = R + P   Ds elements of a stored latent:
        D, or 656 bytes if the latent is block-scaled
    N pages   C page size   M block-table width   L layers   Z state slots
    Hk, Hv key and value heads of the delta rule   Dk, Dv their head dims (128)
    W convolution width   Dc = 2 * Hk * Dk + Hv * Dv convolution channels
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from jaxattn import interrupt
from jaxattn.core import moved_modules

interrupt.guard_command()  # before anything imports JAX

if TYPE_CHECKING:
    from jaxattn.aliasing.checker import AliasingError as AliasingError
    from jaxattn.aliasing.checker import check_aliasing as check_aliasing
    from jaxattn.arena import Arena as Arena
    from jaxattn.arena import ArenaError as ArenaError
    from jaxattn.arena import ArenaSpec as ArenaSpec
    from jaxattn.core.cache.formats import LatentFormat as LatentFormat
    from jaxattn.core.numerics.rope import RopeConfig as RopeConfig
    from jaxattn.core.numerics.rope import YarnConfig as YarnConfig
    from jaxattn.core.numerics.rope import rotation as rotation
    from jaxattn.core.numerics.rope import softmax_scale as softmax_scale
    from jaxattn.engine.engine import Engine as Engine
    from jaxattn.engine.requests.outputs import Completion as Completion
    from jaxattn.engine.requests.outputs import logprob_array as logprob_array
    from jaxattn.engine.requests.request import Request as Request
    from jaxattn.limits import Limits as Limits
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
else:  # a type checker that saw this function would accept every name

    def __getattr__(name: str) -> Any:
        """Imports a name, or a submodule, at its first use."""
        if (module := _MODULES.get(name)) is not None:
            found = getattr(importlib.import_module(module), name)
        elif name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        else:
            found = importlib.import_module(f"{__name__}.{name}")
        globals()[name] = found
        return found


moved_modules.install()

__version__ = "0.1.0"

# Where each name of the package is defined. A name is imported when it is first used, because the
# engine and its models take longer to import than JAX: a program that uses one op pays for that op.
_MODULES = {
    "AliasingError": "jaxattn.aliasing.checker",
    "check_aliasing": "jaxattn.aliasing.checker",
    "Arena": "jaxattn.arena",
    "ArenaError": "jaxattn.arena",
    "ArenaSpec": "jaxattn.arena",
    "LatentFormat": "jaxattn.core.cache.formats",
    "RopeConfig": "jaxattn.core.numerics.rope",
    "YarnConfig": "jaxattn.core.numerics.rope",
    "rotation": "jaxattn.core.numerics.rope",
    "softmax_scale": "jaxattn.core.numerics.rope",
    "Engine": "jaxattn.engine.engine",
    "Completion": "jaxattn.engine.requests.outputs",
    "logprob_array": "jaxattn.engine.requests.outputs",
    "Request": "jaxattn.engine.requests.request",
    "Limits": "jaxattn.limits",
    "causal_conv1d": "jaxattn.ops.gdn.causal_conv1d",
    "causal_conv1d_update": "jaxattn.ops.gdn.causal_conv1d",
    "chunk_gated_delta_rule": "jaxattn.ops.gdn.chunk",
    "gated_delta_rule_decode": "jaxattn.ops.gdn.decode",
    "gated_delta_net_decode": "jaxattn.ops.gdn.layer_decode",
    "pack_gdn_weights": "jaxattn.ops.gdn.layer_decode",
    "gated_delta_rule_prefill": "jaxattn.ops.gdn.prefill",
    "gdn_gates": "jaxattn.ops.gdn.recurrent",
    "recurrent_gated_delta_rule": "jaxattn.ops.gdn.recurrent",
    "absorb_output": "jaxattn.ops.mla.absorption",
    "absorb_query": "jaxattn.ops.mla.absorption",
    "mla_append": "jaxattn.ops.mla.append",
    "pack_mla_weights": "jaxattn.ops.mla.append",
    "mla_cache_write": "jaxattn.ops.mla.cache_write",
    "mla_decode": "jaxattn.ops.mla.decode",
    "mla_prefill": "jaxattn.ops.mla.prefill",
    "merge_attention_states": "jaxattn.ops.mla.state_merge",
    "Parallel": "jaxattn.parallel",
}

__all__ = [*_MODULES]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
