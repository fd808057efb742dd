"""An engine over the GPUs of a layout; prints what it did as JSON.

    python -m tests.parallel.gpus_engine tensor=2,context=2 0.2
    python -m tests.parallel.gpus_engine "tensor=2 in one launch"
    python -m tests.parallel.gpus_engine "tensor=4,context=4 of eight heads"
    python -m tests.parallel.gpus_engine alone

It is the embedded model's, which has two heads, or one of eight heads with random weights. The
number is the share of each GPU's memory that the engine's cache takes most of; without it the cache
is small.
"""

import dataclasses
import json
import sys
from typing import Any

import jax
import numpy as np

from jaxattn import Engine, Limits, Parallel, Request
from jaxattn.bench.multi_gpu.parallel_decode import read_layout
from jaxattn.memory.device_memory import device_memory
from jaxattn.models import Hybrid
from jaxattn.models.checkpoint import EMBEDDED, load
from tests.parallel.cases import drawn_params

PROMPTS = (b"def fib(n):\n", b"import ", b"class Tree:\n    def __init__(self", b"for i in range(")
TOKENS = 48
PAGE_BYTES = 2 * 64 * 576 * 2  # of its two layers of latents, in bfloat16
FEW = 64  # pages
# Behind a layout.
ONE_LAUNCH = " in one launch"  # sums over the GPUs, residuals and norms are so
EIGHT = " of eight heads"


def main(text: str, share: float | None = None) -> None:
    layout = text.removesuffix(ONE_LAUNCH).removesuffix(EIGHT)
    parallel, pages = Parallel() if layout == "alone" else read_layout(layout), FEW
    if share is not None:
        memory = device_memory(jax.devices()[0])
        assert memory is not None
        pages = int(0.8 * share * memory.total) // PAGE_BYTES
    model = eight_heads() if EIGHT in text else embedded()
    print(json.dumps(served(model, parallel, pages, fused=ONE_LAUNCH in text)), flush=True)


def served(
    model: tuple[Hybrid, Any], parallel: Parallel, pages: int, *, fused: bool
) -> dict[str, Any]:
    devices = jax.devices()[: parallel.gpus]
    with engine(model, parallel, pages, fused=fused) as made:
        made.start()
        sealed = [in_use(device) for device in devices]
        done = made.generate(requests())
        return {
            "tokens": [list(each.tokens) for each in done],
            "planned_inside": made.plan.inside,
            "items": {item.name: item.nbytes for item in made.plan.items},
            "peaks": [(device.memory_stats() or {})["peak_bytes_in_use"] for device in devices],
            "in_use_when_sealed": sealed,
            "in_use_at_the_end": [in_use(device) for device in devices],
            "after_seal": dict(made.seal.counts),
        }


def engine(
    of: tuple[Hybrid, Any], parallel: Parallel, pages: int = FEW, *, fused: bool = False
) -> Engine:
    whole, params = of
    model = whole.with_fused_sums(None if fused else 0)
    limits = Limits(batch=4, max_model_len=512, num_pages=pages, decode_buckets=())
    return Engine(model, params, limits, parallel=parallel, strict=True, workers=16)


def requests() -> list[Request]:
    return [Request(prompt, max_tokens=TOKENS) for prompt in PROMPTS]


def embedded() -> tuple[Hybrid, Any]:
    """The model, and its parameters on the host: whole, they shall lie on no GPU."""
    config, params = load(EMBEDDED)
    return Hybrid(config), jax.tree.map(np.asarray, params)


def eight_heads() -> tuple[Hybrid, Any]:
    """As wide as the embedded model, for layouts that divide more than its two heads."""
    config, _ = load(EMBEDDED)
    heads: Any = dict(num_attention_heads=8, linear_num_value_heads=8, linear_num_key_heads=2)
    model = Hybrid(dataclasses.replace(config, **heads, intermediate_size=512))
    return model, drawn_params(model)


def in_use(device: jax.Device) -> int:
    """Bytes of JAX's pool that hold something."""
    return int((device.memory_stats() or {})["bytes_in_use"])


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
