"""vLLM's decode over a TurboQuant cache, in Triton, for `jaxattn.bench.peers`.

The kernels are imported from vLLM as its users have it. A folder `vllm` with these modules of its
wheel, and what they import, does as well where PyTorch is not the one that vLLM pins.
"""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxattn.bench.timing import rotation
from jaxattn.core.turboquant import TurboFormat, hadamard

DEVICE = "cuda"
PAGE = 16  # vLLM's own, on CUDA
SPLITS = 32  # of each row, what vLLM takes whatever its length
CONFIG = "vllm.model_executor.layers.quantization.turboquant.config"
CENTROIDS = "vllm.model_executor.layers.quantization.turboquant.centroids"
KERNELS = "vllm.v1.attention.ops.triton_turboquant_decode"


def decode(
    batch: int, heads: int, kv_heads: int, dim: int, tokens: int, preset: str
) -> Callable[[int], Any]:
    """Over random codes with the numbers of normal keys and values, as ours; its buffers are made
    before, as vLLM's are."""
    t, kernels = importlib.import_module("torch"), importlib.import_module(KERNELS)
    cache_type = importlib.import_module(CONFIG).TurboQuantConfig
    settings = cache_type.from_cache_dtype(f"turboquant_{preset}", dim)
    levels = importlib.import_module(CENTROIDS).get_centroids(dim, settings.centroid_bits)
    form, pages = TurboFormat(preset=preset, head_dim=dim), batch * -(-tokens // PAGE)
    layers = min(rotation(batch * tokens * kv_heads * form.slot_bytes, most=32), 4)
    turn = t.tensor(np.asarray(hadamard(dim)).tolist(), dtype=t.float32, device=DEVICE)
    table = np.random.default_rng(0).permutation(pages).reshape(batch, -1)
    fixed = {
        "query": t.randn(batch, heads, dim, dtype=t.bfloat16, device=DEVICE),
        "block_table": t.tensor(table.tolist(), dtype=t.int32, device=DEVICE),
        "seq_lens": t.full((batch,), tokens, dtype=t.int32, device=DEVICE),
        "Pi": turn,
        "PiT": turn,
        "centroids": levels.to(DEVICE),
        "scale": dim**-0.5,
        "mse_bits": settings.key_mse_bits,
        "key_packed_size": settings.key_packed_size,
        "value_quant_bits": settings.effective_value_quant_bits,
        "key_fp8": settings.key_fp8,
        "norm_correction": settings.norm_correction,
        "max_num_kv_splits": SPLITS,
        "mid_o_buf": t.empty(batch, heads, SPLITS, dim + 1, dtype=t.float32, device=DEVICE),
        "output_buf": t.empty(batch, heads, dim, dtype=t.bfloat16, device=DEVICE),
        "lse_buf": t.empty(batch, heads, dtype=t.float32, device=DEVICE),
    }
    caches = [_codes(t, form, settings, pages, kv_heads) for _ in range(layers)]
    return lambda i: kernels.triton_turboquant_decode_attention(
        kv_cache=caches[i % layers], **fixed
    )


def _codes(t: Any, form: TurboFormat, settings: Any, pages: int, kv_heads: int) -> Any:
    """Slots [pages, 16, Hk, bytes]: keys and their norms, then values, their scales and minima."""
    shape = pages, PAGE, kv_heads, settings.slot_size
    slots = t.randint(0, 256, shape, dtype=t.uint8, device=DEVICE)
    numbers = [6 / (2**form.value_bits - 1), -3.0]
    if form.rotated:
        _write(t, slots, settings.key_packed_size - 2, [1.0])
    else:
        keys = t.randn(*shape[:3], form.head_dim, device=DEVICE).to(t.float8_e4m3fn)
        slots[..., : form.head_dim] = keys.view(t.uint8)
    _write(t, slots, settings.slot_size - 4, numbers)
    return slots


def _write(t: Any, slots: Any, at: int, numbers: list[float]) -> None:
    """The bytes of float16 numbers, of every slot."""
    some = t.tensor(np.array(numbers, np.float16).view(np.uint8).tolist(), dtype=t.uint8)
    slots[..., at : at + len(some)] = some.to(DEVICE)
