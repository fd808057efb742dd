"""Each public op that has a kernel, once, in the smallest sizes that the kernel supports."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxattn.core.numerics.rope import RopeConfig, rotation
from jaxattn.core.turboquant.codec import TurboFormat
from jaxattn.ops.moe.routing import Router
from scripts.cases.case import KernelCase

FORM = TurboFormat(preset="k8v4", head_dim=64)
PAGED: dict[str, Any] = {"B": 2, "P": 2, "N": 4, "C": 16}
HEADS: dict[str, Any] = {"T": 1, "H": 4, "Hk": 2, "D": 64}
RULE: dict[str, Any] = {"B": 2, "T": 2, "Hk": 1, "Hv": 2}
NET: dict[str, Any] = {"B": 2, "T": 1, "Z": 3}
PRODUCT: dict[str, Any] = {"B": 2, "F": 128, "L": 2}
INTEGERS = {
    "block_tables": [[0, 2], [3, 1]], "seq_lens": [19, 7], "query_lens": [1, 1],
    "state_indices": [0, 2], "ids": [[0, 2], [3, 1]],
}  # fmt: skip


def single(op: str, options: dict[str, Any] | None = None, **sizes: Any) -> tuple[str, KernelCase]:
    return op, KernelCase(op, sizes, options=options or {}, values=INTEGERS)


def cases() -> dict[str, KernelCase]:
    """The cases, by the names of their ops."""
    scale, layer = {"scale": 0.1}, {"layer": 1}
    config = RopeConfig(dim=64, interleaved=False)
    angles = rotation(jnp.asarray(np.zeros((2, 1), np.int32)), config)
    turned: dict[str, Any] = {"rotation": angles, "config": config}
    codes, slot = {"form": FORM}, FORM.slot_bytes
    router = {"router": Router(experts=32, top_k=2, scores="sigmoid")}
    return dict(
        [
            single("mla_decode", scale, T=1, H=4, D=576, latent=576, **PAGED),
            single("mla_prefill", scale, T=2, H=1, **PAGED),
            single("causal_attention", scale, B=2, T=2, H=1, D=192, Dk=192),
            single("mla_append", turned, T=1, D=576, W=128, **PAGED),
            single("gqa_decode", **HEADS, **PAGED),
            single("gqa_prefill", **HEADS, **PAGED),
            single("gqa_attention", B=2, **HEADS),
            single("gqa_append", turned, **HEADS, **PAGED),
            single("turbo_attention", codes, slot=slot, **HEADS, **PAGED),
            single(
                "turbo_append", {"weights": None, **turned, **codes}, slot=slot, **HEADS, **PAGED,
            ),
            single("gated_delta_rule_decode", Z=3, gates="float32", **RULE),
            single("gated_delta_net_decode", Hk=1, Hv=2, **NET),
            single("chunk_gated_delta_rule", **RULE),
            single("gated_delta_rule_prefill", Z=3, **RULE),
            single("kda_decode", Z=3, gates="float32", **RULE),
            single("kimi_delta_attention_decode", H=2, D=128, **NET),
            single("chunk_kda", channels=True, **RULE),
            single("kda_prefill", Z=3, channels=True, **RULE),
            single("mixture_of_experts", B=2, E=4, K=2, F=128, W=64),
            single("route", router, B=2, E=32, bias=True),
            single("linear_layer", layer, sizes=(128, 192), **PRODUCT),
            single("gated_layer", layer, size=128, **PRODUCT),
            single("heads_layer", layer, B=2, H=4, D=128, size=128, L=2),
            single("linear_fp8_layer", layer, sizes=(128, 192), **PRODUCT),
            single("gated_fp8_layer", layer, sizes=(128, 128), **PRODUCT),
            single("rms_norm_layer", layer, B=(2,), F=128, L=2),
        ]
    )  # fmt: skip
