"""`python -m jaxattn.bench step`: a scanned decode step beside the sum of its kernels and matmuls.

The durations of the GPU's kernels come from a profile of the same executable: Mosaic kernels,
matrix products, everything else (norms, convolution, gates, cache writes).
"""

import glob
import tempfile
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.bench.timing import seconds
from jaxattn.dispatch import Implementation
from jaxattn.models.config import HybridConfig
from jaxattn.models.hybrid import (
    DecodeBatch,
    DecodeState,
    decode_step,
    init_params,
    init_state,
    jit_step,
)

STEPS = 10
KERNELS = ("mla_decode", "gdn_decode")
MATMULS = ("gemm", "cutlass", "cublas", "nvjet", "xmma", "dot")


def config(*, small: bool) -> HybridConfig:
    """16 layers at DeepSeek-V3's attention and Qwen3.5-397B's delta-net dimensions, dense MLPs."""
    if small:
        return HybridConfig(
            vocab_size=256, hidden_size=64, intermediate_size=64, num_repeats=2,
            num_attention_heads=2, linear_num_value_heads=1, tie_embeddings=True,
        )  # fmt: skip
    return HybridConfig(
        vocab_size=1024, hidden_size=4096, intermediate_size=12288, num_repeats=4,
        num_attention_heads=128, q_lora_rank=1536, linear_num_key_heads=16,
        linear_num_value_heads=64, tie_embeddings=True,
    )  # fmt: skip


def batch_of(rows: int, tokens: int) -> DecodeBatch:
    pages = -(-tokens // 64)
    tables = np.random.default_rng(0).permutation(rows * pages).reshape(rows, pages)
    return DecodeBatch(
        tokens=jnp.arange(rows, dtype=jnp.int32)[:, None] % 256,
        seq_lens=jnp.full((rows,), tokens, jnp.int32),
        block_tables=jnp.asarray(tables, jnp.int32),
        state_indices=jnp.asarray(np.random.default_rng(1).permutation(rows), jnp.int32),
    )


def kernel_seconds(call) -> dict[str, float]:
    """Seconds of GPU time by kernel name, over one call."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        file = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)[0]
        data = jax.profiler.ProfileData.from_serialized_xspace(Path(file).read_bytes())
        spent: dict[str, float] = defaultdict(float)
        for plane in data.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        spent[event.name] += event.duration_ns * 1e-9
    return spent


def measure(*, small: bool, implementation: Implementation | None) -> list[dict]:
    cfg = config(small=small)
    rows, tokens = (4, 128) if small else (64, 4096)
    batch = batch_of(rows, tokens)
    layers = cfg.num_repeats * (cfg.gdn_per_repeat + 1)
    params = init_params(cfg, jax.random.key(0))
    state = init_state(
        cfg, rows, batch.block_tables.size, rows, max_pages=batch.block_tables.shape[1]
    )
    # Random caches: zeros time faster than data.
    key = iter(jax.random.split(jax.random.key(1), 3))
    fill = jax.jit(lambda x, key: jax.random.normal(key, x.shape, x.dtype), donate_argnums=0)
    state = DecodeState(
        state.arena,
        *(fill(x, next(key)) for x in (state.kv_cache, state.conv_state, state.ssm_state)),
    )
    step = jit_step(decode_step, cfg, implementation=implementation)
    step = step.lower(params, state, batch).compile()
    held = [state]

    def call():
        for _ in range(STEPS):
            logits, held[0] = step(params, held[0], batch)
        return logits

    wall = seconds(call) / STEPS
    report: dict[str, float] = defaultdict(float)
    names: dict[str, float] = {}
    for name, time in kernel_seconds(call).items():
        words = name.lower()
        kind = (
            "kernels" if any(word in words for word in KERNELS)
            else "matmuls" if any(word in words for word in MATMULS)
            else "other"
        )  # fmt: skip
        report[kind] += time / STEPS
        names[name] = time / STEPS / layers * 1e6
    row: dict = {
        "layers": layers,
        "batch": rows,
        "tokens": tokens,
        "us a layer": wall / layers * 1e6,
    }
    for kind in ("kernels", "matmuls", "other"):
        row[f"{kind} us"] = report[kind] / layers * 1e6
    work = report["kernels"] + report["matmuls"]
    if work:
        row["over kernels + matmuls, %"] = (wall / work - 1) * 100
    row["XLA temp MiB"] = step.memory_analysis().temp_size_in_bytes / 2**20
    for name, us in sorted(names.items(), key=lambda item: -item[1])[:30]:
        print(f"{us:9.2f} us a layer  {name[:100]}")
    return [row]
