"""The separate process of tests/plan/test_plan_gpu.py: serving from a full device.

A model of about 40 GiB with random weights gets the memory that its plan leaves. It then runs 500
mixed steps, in which requests come and go, and some hold all pages. The script prints JSON.
"""

import json
import random
import sys
import time

import jax

from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.outputs import GenerationInterrupted
from jaxattn.engine.requests.request import Request
from jaxattn.limits import Limits
from jaxattn.models.embedded.hybrid_config import HybridConfig
from jaxattn.models.embedded.hybrid_model import Hybrid
from jaxattn.plan import nbytes

UTILIZATION, STEPS = 0.98, 500
CONFIG = HybridConfig(
    vocab_size=32768,
    hidden_size=4096,
    intermediate_size=14336,
    num_repeats=22,
    num_attention_heads=64,
    q_lora_rank=1536,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    max_position_embeddings=131072,
)
LIMITS = Limits(
    batch=64,
    max_model_len=98304,
    prefill_chunk=512,
    decode_buckets=(16,),
    utilization=UTILIZATION,
)


LONG = 47


def requests(pages: int) -> list[Request]:
    """Short requests that come and go, and among the later ones 48 that own all pages together."""
    random.seed(0)
    found = []

    def add(prompt_tokens: int, cached_tokens: int) -> None:
        prompt = [random.randrange(CONFIG.vocab_size) for _ in range(prompt_tokens)]
        # The last token that a row generates is never cached.
        found.append(Request(prompt, max_tokens=cached_tokens - prompt_tokens + 1, id=len(found)))

    each = pages // (LONG + 1)
    for i in range(120 + LONG):
        if i < 73 or i % 2:
            prompt = random.randrange(1, 1500)
            add(prompt, prompt + random.randrange(1, 40))
        else:
            add(random.randrange(1, 600), each * PAGE_SIZE)
    add(100, (pages - LONG * each) * PAGE_SIZE)
    return found


def main() -> None:
    began = time.perf_counter()
    clock = {}

    def lap(name: str) -> None:
        clock[name] = round(time.perf_counter() - began, 1)
        stats = jax.devices()[0].memory_stats() or {}
        print(name, clock[name], "s", {k: f"{v:,}" for k, v in stats.items()}, file=sys.stderr)

    params = Hybrid(CONFIG).init_params(jax.random.key(0))
    jax.block_until_ready(params)
    lap("weights")
    compiled = []
    engine = Engine(
        Hybrid(CONFIG),
        params,
        LIMITS,
        strict=True,
        workers=3,
        on_compile=lambda name, s: compiled.append((name, s)) if s is not None else None,
    )
    weights = nbytes(params)
    del params
    lap("planned")
    engine.start()
    lap("started")
    sealed = jax.devices()[0].memory_stats()
    most_owned = steps = 0

    def on_token(request: Request, token: int) -> None:
        nonlocal most_owned, steps
        most_owned = max(most_owned, engine.scheduler.pages.in_use)
        steps = engine.stats.decode_steps + engine.stats.prefill_steps
        if steps >= STEPS and most_owned == engine.limits.pages or steps >= 3 * STEPS:
            raise KeyboardInterrupt

    try:
        done = engine.generate(requests(engine.limits.pages), on_token=on_token)
    except GenerationInterrupted as interrupt:
        done = interrupt.completions
    lap("served")
    stats = jax.devices()[0].memory_stats()
    plan = engine.plan
    print(
        json.dumps(
            {
                "device": jax.devices()[0].device_kind,
                "weights": weights,
                "utilization": UTILIZATION,
                "planned_inside": plan.inside,
                "planned_outside": plan.outside,
                "reserve": plan.reserve,
                "items": {item.name: item.nbytes for item in plan.items},
                "limit": stats["bytes_limit"],
                "peak": stats["peak_bytes_in_use"],
                "in_use_when_sealed": sealed["bytes_in_use"],
                "in_use_at_the_end": stats["bytes_in_use"],
                "pages": engine.limits.pages,
                "wanted_pages": LIMITS.wanted_pages,
                "most_pages_owned": most_owned,
                "cache_bytes": engine.state.array("kv_cache").nbytes,
                "steps": steps,
                "prefill_steps": engine.stats.prefill_steps,
                "decode_steps": engine.stats.decode_steps,
                "prefill_seconds": engine.stats.prefill_seconds,
                "seconds_of_serving": engine.stats.seconds,
                "finished": sum(each.finish_reason == "length" for each in done),
                "after_seal": dict(engine.seal.counts),
                "compiled": compiled,
                "seconds": clock,
            }
        )
    )


if __name__ == "__main__":
    main()
