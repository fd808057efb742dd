"""The separate process of tests/plan/test_real_shapes_gpu.py: a public model's shapes.

    python -m tests.helpers.serve_real_shapes DeepSeek-V2-Lite

The script serves random weights in the model's real shapes from the memory that the plan leaves,
for about a hundred mixed steps, and prints JSON. XLA_PYTHON_CLIENT_MEM_FRACTION is its part of the
device, so that two models can run side by side.
"""

import json
import os
import random
import sys
import time

import jax

from jaxattn.bench.model.model_lookup import find
from jaxattn.bench.model.random_weights import random_params
from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.request import Request
from jaxattn.limits import Limits
from jaxattn.memory.plan import nbytes

LIMITS = Limits(
    batch=32,
    max_model_len=8192,
    prefill_chunk=512,
    decode_buckets=(1,),
    utilization=float(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]),
)
REQUESTS = 48


def requests(vocab: int) -> list[Request]:
    """Requests of 1 to 1,500 tokens, greedy and sampled, some with filters."""
    draw = random.Random(0)
    return [
        Request(
            [draw.randrange(vocab) for _ in range(draw.randrange(1, 1500))],
            max_tokens=draw.randrange(1, 40),
            temperature=0.0 if number % 3 else 0.8,
            top_p=0.9 if number % 6 == 0 else 1.0,
            id=number,
        )
        for number in range(REQUESTS)
    ]


def main(name: str) -> None:
    began = time.perf_counter()
    _, _, model = find(name)
    weights, limit = nbytes(model.param_shapes()), jax.devices()[0].memory_stats()["bytes_limit"]
    if weights > 0.95 * limit:
        words = f"weights of {weights / 1e9:.0f} GB do not fit in {limit / 1e9:.0f} GB"
        print(json.dumps({"too_large": words}))
        return
    params = random_params(model)
    jax.block_until_ready(params)
    print("weights", round(time.perf_counter() - began, 1), "s", file=sys.stderr)
    engine = Engine(model, params, LIMITS, strict=True, workers=6)
    del params
    engine.start()
    print("started", round(time.perf_counter() - began, 1), "s", file=sys.stderr)
    device = jax.devices()[0]
    sealed = device.memory_stats()
    done = engine.generate(requests(model.vocab_size))
    stats = device.memory_stats()
    print(
        json.dumps(
            {
                "device": device.device_kind,
                "planned_inside": engine.plan.inside,
                "items": {item.name: item.nbytes for item in engine.plan.items},
                "limit": stats["bytes_limit"],
                "peak": stats["peak_bytes_in_use"],
                "in_use_when_sealed": sealed["bytes_in_use"],
                "in_use_at_the_end": stats["bytes_in_use"],
                "pages": engine.limits.pages,
                "finished": [each.finish_reason for each in done],
                "prefill_steps": engine.stats.prefill_steps,
                "decode_steps": engine.stats.decode_steps,
                "after_seal": dict(engine.seal.counts),
                "seconds": round(time.perf_counter() - began, 1),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
