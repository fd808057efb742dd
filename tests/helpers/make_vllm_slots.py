"""Writes tests/data/vllm_slots.npz: slots that vLLM's own store writes, on a CPU.

    PYTHONPATH=FOLDER TRITON_INTERPRET=1 python tests/helpers/make_vllm_slots.py

FOLDER contains vLLM 0.33.0, or the modules of it that this script imports, and their imports. The
stored file was made with torch 2.14.1 and Triton 3.8.0. Triton's interpreter rounds incorrectly to
e4m3 if the exponent grows, so the script first rounds keys to e4m3.
"""

from pathlib import Path

import numpy as np
import torch
from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
from vllm.v1.attention.ops import triton_turboquant_store

TOKENS, DIM = 16, 128
PRESETS = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")


def hadamard(dim: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < dim:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(dim)


def main() -> None:
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # on which the use of e4m3 depends
    k, v = np.random.default_rng(2).normal(size=(2, TOKENS, 1, DIM)).astype(np.float16)
    k[3], k[7], v[5] = 0, k[7] * 30, 1.5
    k = torch.from_numpy(k).to(torch.float8_e4m3fn).half()
    made = {"k": k.numpy(), "v": v}
    for preset in PRESETS:
        settings = TurboQuantConfig.from_cache_dtype(f"turboquant_{preset}", DIM)
        cache = torch.zeros((1, TOKENS, 1, settings.slot_size), dtype=torch.uint8)
        levels = get_centroids(DIM, settings.centroid_bits)
        triton_turboquant_store.triton_turboquant_store(
            k,
            torch.from_numpy(v),
            cache,
            torch.arange(TOKENS),
            torch.from_numpy(hadamard(DIM).astype(np.float32)),
            (levels[1:] + levels[:-1]) / 2,
            mse_bits=settings.key_mse_bits,
            key_packed_size=settings.key_packed_size,
            value_quant_bits=settings.effective_value_quant_bits,
            key_fp8=settings.key_fp8,
        )
        made[preset] = cache.numpy()
    np.savez_compressed(Path(__file__).parents[1] / "data" / "vllm_slots.npz", **made)


if __name__ == "__main__":
    main()
