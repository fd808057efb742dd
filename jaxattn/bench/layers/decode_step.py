"""`python -m jaxattn.bench step`: a scanned decode step, compared with the sum of its parts.

The parts come from a profile of the same executable, and so does the time that they are compared
with. They are the Mosaic kernels over caches and states, the small kernels around the products
(norms, cache write), matrix products, everything else that XLA generates, and the gaps.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.aliasing.checker import AliasingReport, check_aliasing
from jaxattn.bench.harness.timing import profile, seconds
from jaxattn.core.dispatch import Implementation
from jaxattn.models import CacheSize, DecodeBatch, DecodeState, Hybrid, HybridConfig
from jaxattn.models.interface import init_state, jit_step, scratch_spec

STEPS = 10
# Name parts of our kernels: those over caches and states, and those around a layer's products.
KERNELS = ("mla_decode", "gdn_decode")
SMALL_KERNELS = ("mla_append", "rms_norm")
MATMULS = ("gemm", "cutlass", "cublas", "nvjet", "xmma", "dot")


def models(*, small: bool) -> dict[str, HybridConfig]:
    """Two models of 16 layers: DeepSeek-R1's attention with its dense MLP, and a hybrid.

    The hybrid has Qwen3.5-397B's delta nets before each such attention layer.
    """
    if small:
        tiny = HybridConfig(
            vocab_size=256, hidden_size=64, intermediate_size=64, num_repeats=2,
            num_attention_heads=2, tie_embeddings=True,
        )  # fmt: skip
        return {"tiny": tiny}
    mla = HybridConfig(
        vocab_size=1024, hidden_size=7168, intermediate_size=18432, num_repeats=16,
        gdn_per_repeat=0, num_attention_heads=128, q_lora_rank=1536, tie_embeddings=True,
    )  # fmt: skip
    hybrid = HybridConfig(
        vocab_size=1024, hidden_size=4096, intermediate_size=12288, num_repeats=4,
        num_attention_heads=128, q_lora_rank=1536, linear_num_key_heads=16,
        linear_num_value_heads=64, tie_embeddings=True,
    )  # fmt: skip
    return {"MLA 128 heads": mla, "3 GDN 16/64 : 1 MLA": hybrid}


def batch_of(rows: int, tokens: int) -> DecodeBatch:
    pages = -(-tokens // 64)
    tables = np.random.default_rng(0).permutation(rows * pages).reshape(rows, pages)
    return DecodeBatch(
        tokens=jnp.arange(rows, dtype=jnp.int32)[:, None] % 256,
        seq_lens=jnp.full((rows,), tokens, jnp.int32),
        block_tables=jnp.asarray(tables, jnp.int32),
        state_indices=jnp.asarray(np.random.default_rng(1).permutation(rows), jnp.int32),
    )


def measure(*, small: bool, implementation: Implementation | None) -> list[dict]:
    """Returns a row for each model and context length."""
    lengths = (128,) if small else (4096, 16384)
    return [
        _measure(name, config, 4 if small else 64, tokens, implementation)
        for name, config in models(small=small).items()
        for tokens in lengths
    ]


def _measure(
    name: str,
    config: HybridConfig,
    rows: int,
    tokens: int,
    implementation: Implementation | None,
) -> dict:
    batch = batch_of(rows, tokens)
    model = Hybrid(config)
    params = model.pack(model.init_params(jax.random.key(0)))
    step: Any = jit_step(model.decode, implementation=implementation)
    held = [_random_state(model, batch)]
    compiled = step.lower(params, held[0], batch).compile()
    report = check_aliasing(compiled)

    def call():
        for _ in range(STEPS):
            logits, held[0] = compiled(params, held[0], batch)
        return logits

    layers = config.num_gdn_layers + config.num_mla_layers
    scale = 1e6 / STEPS / layers
    wall = seconds(call) * scale
    spent = {"kernels": 0.0, "small kernels": 0.0, "matmuls": 0.0, "other": 0.0}
    names = {}
    kernels, span = profile(call)
    for kernel, time in kernels.items():
        spent[_kind(kernel)] += time * scale
        names[kernel] = time * scale
    for kernel, us in sorted(names.items(), key=lambda item: -item[1])[:25]:
        print(f"{us:9.2f} us a layer  {kernel[:90]}", file=sys.stderr)
    work = spent["kernels"] + spent["small kernels"] + spent["matmuls"]
    return {
        "model": name,
        "layers": layers,
        "B": rows,
        "T": tokens,
        "us a layer": wall,
        "profiled us": span * scale,
        **{f"{kind} us": us for kind, us in spent.items()},
        "over kernels + matmuls": f"{span * scale / work - 1:.1%}" if work else "not profiled",
        "temp MiB": report.temp_bytes / 2**20 if report.temp_bytes else 0.0,
        "copied in the loop": copied_in_loop(report),
    }


def copied_in_loop(report: AliasingReport) -> str:
    """The leaf (state or weight) of the largest copy inside a loop, and its bytes per iteration."""
    copy = report.largest_copy_in_loop
    return f"{copy.leaf}: {copy.nbytes:,} bytes" if copy else "none"


def _random_state(model: Hybrid, batch: DecodeBatch) -> DecodeState:
    """Random caches and states, because kernels run faster on zeros than on real data."""
    rows, pages = batch.block_tables.shape
    size = CacheSize(pages=rows * pages, slots=rows)
    state = init_state(model, size, scratch_spec(model, rows, max_pages=pages))
    fill = jax.jit(lambda x, key: jax.random.normal(key, x.shape, x.dtype), donate_argnums=0)
    leaves, tree = jax.tree.flatten(state.caches)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return DecodeState(state.arena, jax.tree.unflatten(tree, map(fill, leaves, keys)))


def _kind(kernel: str) -> str:
    words = kernel.lower()
    if any(word in words for word in KERNELS):
        return "kernels"
    if any(word in words for word in SMALL_KERNELS):
        return "small kernels"
    return "matmuls" if any(word in words for word in MATMULS) else "other"
