"""Engines of the embedded model over the GPUs of layouts, one after another; prints JSON of each.

    python -m tests.parallel.two_gpus_engine 0.4 tensor=2,context=2 alone data=2

The number is the share of each GPU's memory that JAX's pool has. The first engine's cache takes
most of it, so that the peak of the process is that engine's.
"""

import json
import sys
from typing import Any

import jax
import numpy as np

from jaxattn import Engine, Limits, Parallel, Request
from jaxattn.bench.parallel import read_layout
from jaxattn.memory.device import device_memory
from jaxattn.models import Hybrid
from jaxattn.models.checkpoint import EMBEDDED, load

PROMPTS = (b"def fib(n):\n", b"import ", b"class Tree:\n    def __init__(self", b"for i in range(")
TOKENS = 48
PAGE_BYTES = 2 * 64 * 576 * 2  # of its two layers of latents, in bfloat16
FEW = 64  # pages of the engines after the first


def main(share: float, layouts: list[str]) -> None:
    memory = device_memory(jax.devices()[0])
    assert memory is not None
    many = int(0.8 * share * memory.total) // PAGE_BYTES
    for number, text in enumerate(layouts):
        parallel = Parallel() if text == "alone" else read_layout(text)
        print(json.dumps({text: served(parallel, FEW if number else many)}), flush=True)


def served(parallel: Parallel, pages: int) -> dict[str, Any]:
    model, params = embedded()
    devices = jax.devices()[: parallel.gpus]
    limits = Limits(batch=4, max_model_len=512, num_pages=pages, decode_buckets=())
    with Engine(model, params, limits, parallel=parallel, strict=True, workers=16) as engine:
        engine.start()
        sealed = [in_use(device) for device in devices]
        done = engine.generate([Request(prompt, max_tokens=TOKENS) for prompt in PROMPTS])
        return {
            "tokens": [list(each.tokens) for each in done],
            "planned_inside": engine.plan.inside,
            "items": {item.name: item.nbytes for item in engine.plan.items},
            "peaks": [(device.memory_stats() or {})["peak_bytes_in_use"] for device in devices],
            "in_use_when_sealed": sealed,
            "in_use_at_the_end": [in_use(device) for device in devices],
            "after_seal": dict(engine.seal.counts),
        }


def embedded() -> tuple[Hybrid, Any]:
    """The model, and its parameters on the host: whole, they shall lie on no GPU."""
    config, params = load(EMBEDDED)
    return Hybrid(config), jax.tree.map(np.asarray, params)


def in_use(device: jax.Device) -> int:
    """Bytes of JAX's pool that hold something."""
    return int((device.memory_stats() or {})["bytes_in_use"])


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
