"""Mixture of experts: a router, and a gated MLP per expert, which only the expert's tokens use.

The router computes float32 scores of E experts per token, and each token uses the best K experts:

    ids, weights = route(x @ router_weight, bias, Router(experts=E, top_k=K, ...))
    y_t = sum_k weights[t, k] * down_e(silu(gate_e x_t) * up_e x_t),   e = ids[t, k]

The time of a step with few tokens depends on the bytes of weights that the step reads. The kernels
read only the weights of the chosen experts, directly from the stack of layers, in the layout of
checkpoints.

Source: Shazeer et al., "Outrageously Large Neural Networks" (2017). The routers follow DeepSeek-V2
and V3.
"""

from jaxattn.kernels.moe.launch import scratch as scratch
from jaxattn.ops.moe.experts import mixture_of_experts as mixture_of_experts
from jaxattn.ops.moe.routing import Router as Router
from jaxattn.ops.moe.routing import route as route
