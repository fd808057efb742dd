"""Rows of exact mode in random company, each generated twice: sampled, and replayed by `score`.

python -m tests.helpers.exact_rows kda 60 [SEED]   runs for 60 seconds on a GPU, with the kernels
"""

import hashlib
import random
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxattn import Engine, Limits, Request
from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.engine.requests.outputs import Completion, FinishEvent, FinishReason, Logprobs
from jaxattn.models.blocks import GDN, GQA, KDA, MLA, MLP, Block, MoE, SparseMLA, Stream
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.network.decoder_spec import DecoderSpec
from jaxattn.ops.moe.routing import Router
from tests.parallel.cases import drawn_params

FAMILIES = {
    "gdn": ("gdn", "gqa"),  # with experts in the first layer
    "kda": ("kda", "mla"),
    "mla": ("mla", "mla"),
    "gqa": ("gqa", "gqa"),
    "sparse": ("sparse", "sparse"),
    "dense": ("gqa", "gqa"),
}
# Tiny layers that XLA runs, and the smallest layers that the kernels support.
TINY: dict[str, Any] = dict(
    hidden=32, heads=2, head=8, latent=16, inner=24, experts=4, vocab=64, top=128, longest=512,
    beginnings=(100, 200, 256, 256),
)  # fmt: skip
LEAST: dict[str, Any] = dict(
    hidden=512, heads=8, head=128, latent=512, inner=256, experts=32, vocab=512, top=512,
    longest=1024, beginnings=(100, 256, 600, 700),
)  # fmt: skip


class Company(NamedTuple):
    """The result of a comparison.

    Attributes:
        rows, tokens: The numbers of compared rows and tokens.
        differing: Ids of rows whose bits differ in the replay.
        preempted, replayed: The number of preempted rows, and of tokens that they decoded again.
        cached: Prompt tokens that were found in the prefix cache.
        digest: A hash of all bits, for comparison with other processes.
    """

    rows: int
    tokens: int
    differing: list[int]
    preempted: int
    replayed: int
    cached: int
    digest: str


def exact_model(family: str, sizes: dict[str, Any]) -> DecoderModel:
    """A bfloat16 model with two layers of a family, the first with experts."""
    hidden, heads, head = (sizes[name] for name in ("hidden", "heads", "head"))
    rope = RopeConfig(dim=head // 2)
    latent: dict[str, Any] = dict(
        num_heads=heads,
        q_lora_rank=hidden // 2,
        kv_lora_rank=sizes["latent"],
        qk_nope_head_dim=head,
        qk_rope_head_dim=head // 2,
        v_head_dim=head,
        rope=rope,
    )
    mixers = {
        "mla": MLA(**latent),
        "sparse": SparseMLA(**latent, top_k=sizes["top"], index_heads=heads, index_head_dim=head),
        "gqa": GQA(num_heads=heads, num_kv_heads=2, head_dim=head, rope=rope),
        "gdn": GDN(num_k_heads=heads // 2, num_v_heads=heads, head_k_dim=head, head_v_dim=head),
        "kda": KDA(num_heads=heads, head_dim=head),
    }
    router = Router(experts=sizes["experts"], top_k=2, scores="softmax")
    dense = MLP(intermediate_size=sizes["inner"])
    experts = MoE(expert_size=sizes["inner"], router=router)
    first, second = (mixers[name] for name in FAMILIES[family])
    return DecoderModel(
        DecoderSpec(
            vocab_size=sizes["vocab"],
            stream=Stream(hidden_size=hidden, eps=1e-6, dtype="bfloat16", param_dtype="bfloat16"),
            blocks=(Block(first, dense if family == "dense" else experts), Block(second, dense)),
            max_position_embeddings=sizes["longest"],
        )
    )


def exact_params(model: DecoderModel, sizes: dict[str, Any]) -> Any:
    """Parameters; those of tiny layers are drawn by NumPy, so that nothing is compiled."""
    return drawn_params(model) if sizes is TINY else model.init_params(jax.random.key(1))


def exact_engine(family: str, sizes: dict[str, Any], **limits: Any) -> Engine:
    """An engine in exact mode whose page pool is too small for all rows at full length."""
    model = exact_model(family, sizes)
    given: dict[str, Any] = dict(
        max_model_len=sizes["longest"], prefill_chunk=256, prefill_rows=2, checkpoints=2
    )
    engine = Engine(
        model,
        exact_params(model, sizes),
        Limits(reproducible=True, **given | limits),
        strict=True,
    )
    engine.start()
    return engine


def random_rows(draw: random.Random, count: int, sizes: dict[str, Any]) -> list[Request]:
    """Requests with all ways of sampling, some of which share a prefix."""
    vocab = sizes["vocab"]
    beginnings = [[draw.randrange(vocab) for _ in range(n)] for n in sizes["beginnings"]]
    found = []
    for number in range(count):
        own = [draw.randrange(vocab) for _ in range(draw.choice([1, 3, 40, 70, 130]))]
        heat = draw.choice([0.0, 0.7, 1.0])
        found.append(
            Request(
                draw.choice([[], *beginnings]) + own,
                max_tokens=draw.choice([1, 8, 40, 90]),
                temperature=heat,
                top_p=draw.choice([1.0, 0.9]),
                repetition_penalty=draw.choice([1.0, 1.0, 1.1]),
                logprobs=draw.choice([0, 3]),
                seed=number,
                id=number,
            )
        )
    return found


def in_company(engine: Engine, requests: list[Request], draw: random.Random) -> list[Completion]:
    """The answers to requests that arrive a few at a time, with other requests that are aborted."""
    left, done, companions = list(requests), {}, range(10**6, 10**6 + len(requests))
    draw.shuffle(left)
    coming = iter(companions)
    while left or engine.busy:
        if left and draw.random() < 0.3:
            for _ in range(min(len(left), draw.choice([1, 1, 2 * engine.limits.batch]))):
                engine.add(left.pop())
            prompt = [draw.randrange(engine.model.vocab_size) for _ in range(draw.choice([2, 140]))]
            engine.add(Request(prompt, max_tokens=60, temperature=1.0, id=next(coming)))
        if draw.random() < 0.02:
            engine.abort(draw.choice(companions))
        for event in engine.step():
            if isinstance(event, FinishEvent):
                done[event.completion.request.id] = event.completion
    return [done[request.id] for request in requests]


def bits(found: tuple[Logprobs | None, ...]) -> list[bytes]:
    """The bits of the tokens' log-probabilities, if there are any."""
    return [np.float32(each.token).tobytes() for each in found if each is not None]


def compare(engine: Engine, requests: list[Request], draw: random.Random) -> Company:
    """Generates rows, and then replays their tokens, each time in other company."""
    before = engine.stats.replayed_tokens, engine.scheduler.preemptions
    done = in_company(engine, requests, draw)
    assert all(each.finish_reason is FinishReason.LENGTH for each in done)
    replayed, cached = engine.stats.replayed_tokens - before[0], engine.prefixes.hits
    order = draw.sample(done, len(done))
    texts = [[*each.request.prompt, *each.tokens] for each in order]
    found = engine.score(texts, starts=[len(each.request.prompt) for each in order])
    differing = [
        each.request.id
        for each, scores in zip(order, found, strict=True)
        if bits(scores) != bits(each.logprobs)
    ]
    return Company(
        rows=len(done),
        tokens=sum(len(each.tokens) for each in done),
        differing=differing,
        preempted=engine.scheduler.preemptions - before[1],
        replayed=replayed + engine.stats.replayed_tokens,
        cached=cached,
        digest=hashlib.sha1(b"".join(b for each in done for b in bits(each.logprobs))).hexdigest()[
            :12
        ],
    )


def on_gpu(family: str) -> Engine:
    """An engine with the smallest layers that the kernels support."""
    engine = exact_engine(family, LEAST, batch=64, num_pages=200, checkpoints=8)
    assert set(engine.implementations.values()) == {"mosaic_gpu"}, engine.implementations
    return engine


def main(family: str, seconds: str, seed: str = "7") -> None:
    """Compares 250 rows at a time until the time is up."""
    begin = time.perf_counter()
    engine, draw = on_gpu(family), random.Random(int(seed))
    print(family, f"ready after {time.perf_counter() - begin:.0f} s", flush=True)
    while time.perf_counter() - begin < float(seconds):
        found = compare(engine, random_rows(draw, 250, LEAST), draw)
        print(family, f"{time.perf_counter() - begin:.0f} s", found, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
