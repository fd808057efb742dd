"""An engine of the embedded model over the GPUs of a layout; prints JSON.

    python -m tests.parallel.two_gpus_engine tensor=2 0.45      "alone" is one GPU

The second number is the share of the GPU's memory that JAX's pool has; the cache takes most of it.
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


def main(text: str, share: float) -> None:
    parallel = Parallel() if text == "alone" else read_layout(text)
    model, params = embedded()
    devices = jax.devices()[: parallel.gpus]
    memory = device_memory(devices[0])
    assert memory is not None
    pages = int(0.8 * share * memory.total) // PAGE_BYTES
    limits = Limits(batch=4, max_model_len=512, num_pages=pages, decode_buckets=())
    with Engine(model, params, limits, parallel=parallel, strict=True, workers=8) as engine:
        engine.start()
        sealed = [in_use(device) for device in devices]
        done = engine.generate([Request(prompt, max_tokens=TOKENS) for prompt in PROMPTS])
        found = {
            "layout": parallel.flags,
            "tokens": [list(each.tokens) for each in done],
            "planned_inside": engine.plan.inside,
            "items": {item.name: item.nbytes for item in engine.plan.items},
            "peaks": [(device.memory_stats() or {})["peak_bytes_in_use"] for device in devices],
            "in_use_when_sealed": sealed,
            "in_use_at_the_end": [in_use(device) for device in devices],
            "outside": [outside(device) for device in devices],
            "after_seal": dict(engine.seal.counts),
        }
    print(json.dumps(found), flush=True)


def embedded() -> tuple[Hybrid, Any]:
    """The model, and its parameters on the host: whole, they shall lie on no GPU."""
    config, params = load(EMBEDDED)
    return Hybrid(config), jax.tree.map(np.asarray, params)


def in_use(device: jax.Device) -> int:
    """Bytes of JAX's pool that hold something."""
    return int((device.memory_stats() or {})["bytes_in_use"])


def outside(device: jax.Device) -> Any:
    """Bytes of the device that JAX's pool has not: the driver's, code, libraries."""
    memory = device_memory(device)
    return memory.outside if memory else None


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
