"""Mixture of experts: a router, and a gated MLP per expert that only its own tokens take.

With float32 scores of E experts per token, of which it takes the best K:

    ids, weights = route(x @ router_weight, bias, Router(experts=E, top_k=K, ...))
    y_t = sum_k weights[t, k] * down_e(silu(gate_e x_t) * up_e x_t),   e = ids[t, k]

A step of few tokens is bound by the bytes of the weights that it reads. The kernels read those of
chosen experts alone, where they lie in the stack of layers, as checkpoints have them.
Shazeer et al., "Outrageously Large Neural Networks" (2017); routers as in DeepSeek-V2 and V3.
"""

from jaxattn.kernels.moe.launch import scratch as scratch
from jaxattn.ops.moe.experts import mixture_of_experts as mixture_of_experts
from jaxattn.ops.moe.routing import Router as Router
from jaxattn.ops.moe.routing import route as route
