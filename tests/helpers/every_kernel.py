"""Every public op that has a kernel once, on small arrays that the kernel takes.

`arguments(name)` gives (arrays, the rest), both by keyword.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import gdn, gqa, kda, mla, moe
from jaxattn.core.numerics.rope import RopeConfig, rotation
from jaxattn.core.turboquant.codec import TurboFormat
from jaxattn.ops.linear.fp8_linear import gated_fp8_layer, linear_fp8_layer
from jaxattn.ops.linear.linear import gated_layer, heads_layer, linear_layer
from jaxattn.ops.linear.rms_norm import rms_norm_layer

PAGE, PAGES = 16, 4
HOPPER = types.SimpleNamespace(device_kind="H200", compute_capability="9.0", core_count=132)
FORM = TurboFormat(preset="k8v4", head_dim=64)

OPS: dict[str, Callable[..., Any]] = {
    "mla_decode": mla.mla_decode,
    "mla_prefill": mla.mla_prefill,
    "causal_attention": mla.causal_attention,
    "mla_append": mla.mla_append,
    "gqa_decode": gqa.gqa_decode,
    "gqa_prefill": gqa.gqa_prefill,
    "gqa_attention": gqa.gqa_attention,
    "gqa_append": gqa.gqa_append,
    "turbo_attention": gqa.turbo_attention,
    "turbo_append": gqa.turbo_append,
    "gated_delta_rule_decode": gdn.gated_delta_rule_decode,
    "gated_delta_net_decode": gdn.gated_delta_net_decode,
    "chunk_gated_delta_rule": gdn.chunk_gated_delta_rule,
    "gated_delta_rule_prefill": gdn.gated_delta_rule_prefill,
    "kda_decode": kda.kda_decode,
    "kimi_delta_attention_decode": kda.kimi_delta_attention_decode,
    "chunk_kda": kda.chunk_kda,
    "kda_prefill": kda.kda_prefill,
    "mixture_of_experts": moe.mixture_of_experts,
    "route": moe.route,
    "linear_layer": linear_layer,
    "gated_layer": gated_layer,
    "heads_layer": heads_layer,
    "linear_fp8_layer": linear_fp8_layer,
    "gated_fp8_layer": gated_fp8_layer,
    "rms_norm_layer": rms_norm_layer,
}


@contextlib.contextmanager
def on_hopper() -> Iterator[None]:
    """Ops see a Hopper GPU, and JAX itself what there is."""
    gpu: Any = {"default_backend": lambda: "gpu", "devices": lambda: [HOPPER]}
    with mock.patch.multiple(jax, **gpu):
        yield


def arguments(name: str, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of two rows; what is random differs by `seed`."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jnp.asarray(rng.normal(size=shape), dtype)

    def narrow(*shape: int) -> Any:
        return draw(*shape) / 8

    def e4m3(*shape: int) -> Any:
        return draw(*shape, dtype=jnp.float8_e4m3fn)

    def ints(*numbers: int) -> Any:
        return jnp.asarray(numbers, jnp.int32)

    paged = {"block_tables": ints(0, 2, 3, 1).reshape(2, 2), "seq_lens": ints(19, 7 + seed)}
    queries = {"query_lens": ints(1, 1)}
    f32: Any = jnp.float32
    pool = draw(3, 2, 128, 128, dtype=f32)
    slots = {"state": pool, "state_indices": ints(0, 2)}
    of_rule = {
        "q": narrow(2, 2, 1, 128), "k": narrow(2, 2, 1, 128), "v": draw(2, 2, 2, 128),
        "g": -abs(draw(2, 2, 2, dtype=f32)), "beta": abs(draw(2, 2, 2, dtype=f32)) % 1,
    }  # fmt: skip
    of_kda = {**of_rule, "g": -abs(draw(2, 2, 2, 128, dtype=f32))}
    config = RopeConfig(dim=64, interleaved=False)
    angles = rotation(jnp.zeros((2, 1), jnp.int32), config)
    pairs, heads = draw(PAGES, 2, PAGE, 2, 64), draw(2, 1, 4, 64)
    new = {"k": draw(2, 1, 2, 64), "v": draw(2, 1, 2, 64)}
    experts = {"gate_up": narrow(4, 128, 128), "down": narrow(4, 128, 64)}
    made: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
        "mla_decode": lambda: (
            {"q": narrow(2, 1, 4, 576), "kv_cache": draw(PAGES, PAGE, 576), **paged},
            {"scale": 0.1},
        ),
        "mla_prefill": lambda: (
            {"q": narrow(2, 2, 1, 192), "latent": draw(2, 2, 576), "w_uk": narrow(1, 128, 512),
             "w_uv": narrow(1, 512, 128), "kv_cache": draw(PAGES, PAGE, 576), **paged, **queries},
            {"scale": 0.1},
        ),
        "causal_attention": lambda: (
            {"q": draw(2, 2, 1, 192), "k": draw(2, 2, 1, 192), "v": draw(2, 2, 1, 128)},
            {"scale": 0.1},
        ),
        "mla_append": lambda: (
            {"kv": draw(2, 1, 576), "q": draw(2, 1, 128), "weights": draw(704, dtype=f32),
             "kv_cache": draw(PAGES, PAGE, 576), **paged},
            {"rotation": angles, "config": config},
        ),
        "gqa_decode": lambda: ({"q": heads, "kv_cache": pairs, **paged}, {}),
        "gqa_prefill": lambda: (
            {"q": heads, **new, "kv_cache": pairs, **paged, **queries}, {},
        ),
        "gqa_attention": lambda: ({"q": heads, **new}, {}),
        "gqa_append": lambda: (
            {"q": heads, **new, "kv_cache": pairs, **paged,
             "weights": gqa.pack_gqa_weights(draw(64, dtype=f32), draw(64, dtype=f32))},
            {"rotation": angles, "config": config},
        ),
        "turbo_attention": lambda: (
            {"q": heads, "kv_cache": gqa.turbo_cache_write(
                jnp.zeros((PAGES, 2, PAGE * FORM.slot_bytes), jnp.uint8),
                draw(2, 19, 2, 64), draw(2, 19, 2, 64), paged["block_tables"], paged["seq_lens"],
                form=FORM, query_lens=paged["seq_lens"],
            ), **paged},
            {"form": FORM},
        ),
        "turbo_append": lambda: (
            {"q": heads, **new, "weights": None, **paged,
             "kv_cache": jnp.zeros((PAGES, 2, PAGE * FORM.slot_bytes), jnp.uint8)},
            {"rotation": angles, "config": config, "form": FORM},
        ),
        "gated_delta_rule_decode": lambda: (
            {**{x: of_rule[x] for x in "qkv"}, "a": of_rule["g"], "b": of_rule["beta"],
             "A_log": draw(2, dtype=f32), "dt_bias": draw(2, dtype=f32), **slots},
            {},
        ),
        "gated_delta_net_decode": lambda: (
            {"qkvz": draw(2, 1, 768), "ba": draw(2, 1, 4, dtype=f32),
             "weights": draw(4 + 128 + 4 * 512, dtype=f32), "conv_state": draw(3, 3, 512),
             **slots},
            {},
        ),
        "chunk_gated_delta_rule": lambda: (of_rule, {}),
        "gated_delta_rule_prefill": lambda: ({**of_rule, **slots}, {}),
        "kda_decode": lambda: (
            {**{name: of_rule[name] for name in "qkv"}, "f": draw(2, 2, 2, 128, dtype=f32),
             "b": draw(2, 2, 2), "A_log": draw(2, dtype=f32), "dt_bias": draw(2, 128, dtype=f32),
             **slots},
            {},
        ),
        "kimi_delta_attention_decode": lambda: (
            {"qkv": draw(2, 1, 768), "f": draw(2, 1, 256, dtype=f32), "b": draw(2, 1, 2),
             "gate": draw(2, 1, 256), "weights": draw(2 + 256 + 128 + 4 * 768, dtype=f32),
             "conv_state": draw(3, 3, 768), **slots},
            {},
        ),
        "chunk_kda": lambda: (of_kda, {}),
        "kda_prefill": lambda: ({**of_kda, **slots}, {}),
        "mixture_of_experts": lambda: (
            {"x": draw(2, 128), "ids": ints(0, 2, 3, 1).reshape(2, 2),
             "weights": abs(draw(2, 2, dtype=f32)), **experts},
            {},
        ),
        "route": lambda: (
            {"logits": draw(2, 32, dtype=f32), "bias": draw(32, dtype=f32)},
            {"router": moe.Router(experts=32, top_k=2, scores="sigmoid")},
        ),
        "linear_layer": lambda: (
            {"x": draw(2, 128), "weights": [narrow(2, 128, 128), narrow(2, 128, 192)]},
            {"layer": 1},
        ),
        "gated_layer": lambda: (
            {"x": draw(2, 128), "gate": narrow(2, 128, 128), "up": narrow(2, 128, 128)},
            {"layer": 1},
        ),
        "heads_layer": lambda: (
            {"x": draw(2, 4, 128), "weights": narrow(2, 4, 128, 128)}, {"layer": 1},
        ),
        "linear_fp8_layer": lambda: (
            {"x": draw(2, 128), "weights": [e4m3(2, 128, 128), e4m3(2, 192, 128)],
             "scales": [abs(draw(2, n, 1, dtype=f32)) for n in (1, 2)]},
            {"layer": 1},
        ),
        "gated_fp8_layer": lambda: (
            {"x": draw(2, 128), "weights": (e4m3(2, 128, 128), e4m3(2, 128, 128)),
             "scales": tuple(abs(draw(2, 1, 1, dtype=f32)) for _ in range(2))},
            {"layer": 1},
        ),
        "rms_norm_layer": lambda: (
            {"x": draw(2, 128), "weights": draw(2, 128, dtype=f32)}, {"layer": 1},
        ),
    }  # fmt: skip
    return made[name]()
