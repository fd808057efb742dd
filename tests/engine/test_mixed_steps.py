"""Steps that read prompts beside rows that decode: what a row says is what it says alone."""

import dataclasses
import functools
import random
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import Engine, Limits, Request, check_aliasing
from jaxattn.core.numerics.rope import QueryScaling, RopeConfig
from jaxattn.engine.requests.outputs import FinishEvent
from jaxattn.engine.scheduling.chunked_prefill import prompt_pieces
from jaxattn.engine.steps.prefill_batch import PromptChunk, PromptLayout, by_lines
from jaxattn.engine.steps.step_catalog import entry_points
from jaxattn.models.blocks import GDN, GQA, KDA, MLA, MLP, Block, MoE, SparseMLA, Stream
from jaxattn.models.caches.layer_cache import CacheSize
from jaxattn.models.interface import DecodeBatch, Model, PrefillBatch, init_state, scratch_spec
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.network.decoder_spec import DecoderSpec
from jaxattn.ops.moe.routing import Router
from tests.parallel.cases import drawn_params

pytestmark = pytest.mark.lazy_steps

STREAM = Stream(hidden_size=16, eps=1e-6, dtype="float32", param_dtype="float32")
LATENT = MLA(
    num_heads=2,
    q_lora_rank=8,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    rope=RopeConfig(dim=8),
)
GROUPED = GQA(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig(dim=4, interleaved=False))
UNROTATED = dataclasses.replace(
    GROUPED,
    rope=RopeConfig(dim=4, theta=None),
    heads_norm=True,
    query_scaling=QueryScaling(0.5, 32),
)
SPARSE = SparseMLA(
    **{each.name: getattr(LATENT, each.name) for each in dataclasses.fields(LATENT)},
    top_k=300,
    index_heads=2,
    index_head_dim=8,
)
DELTA = GDN(num_k_heads=1, num_v_heads=2, head_k_dim=8, head_v_dim=8)
KIMI = KDA(num_heads=2, head_dim=8)
DENSE, EXPERTS = (
    MLP(intermediate_size=24),
    MoE(expert_size=16, router=Router(experts=4, top_k=2, scores="softmax")),
)
FAMILIES = {
    "mla": (Block(LATENT, DENSE), Block(LATENT, EXPERTS)),
    "gqa": (Block(GROUPED, DENSE), Block(GROUPED, EXPERTS)),
    "hybrid": (Block(DELTA, EXPERTS), Block(GROUPED, DENSE)),
    "kimi": (Block(KIMI, DENSE), Block(LATENT, EXPERTS)),
    "all": (
        Block(DELTA, DENSE),
        Block(dataclasses.replace(UNROTATED, window=100, sinks=True), DENSE),
        Block(LATENT, EXPERTS),
    ),
    "sparse": (Block(SPARSE, DENSE),),
}
# Pieces of a prompt take one line, or two; steps of one line, of two and of three. Pages for one
# and a half of four rows at full length, so that rows lose theirs.
LIMITS = Limits(
    batch=4,
    max_model_len=512,
    num_pages=9,
    prefill_chunk=256,
    prefill_rows=3,
    prefill_tokens=384,
    mixed_tokens=256,
    checkpoints=2,
    decode_buckets=(),
    prefill_buckets=(128,),
)
# One size, which is quicker to compile.
FEW = dataclasses.replace(LIMITS, prefill_tokens=256, mixed_tokens=None, prefill_buckets=())
MIXES = 300


@functools.cache
def engine_of(family: str) -> Engine:
    spec = DecoderSpec(
        vocab_size=64, stream=STREAM, blocks=FAMILIES[family], max_position_embeddings=512
    )
    model, limits = DecoderModel(spec), FEW if family in ("all", "sparse") else LIMITS
    engine = Engine(model, drawn_params(model), limits, strict=True)
    engine.start()
    return engine


@functools.cache
def texts() -> list[Request]:
    """Requests of which some begin alike: from one token to three lines of 128."""
    draw = random.Random(7)
    beginnings = [[draw.randrange(64) for _ in range(length)] for length in (64, 128, 256)]
    found = []
    for number in range(24):
        own = [draw.randrange(64) for _ in range(draw.choice([1, 3, 40, 70, 130]))]
        before = draw.choice([[], [], *beginnings])
        prompt = (before + own)[:400]
        found.append(Request(prompt, max_tokens=draw.choice([1, 8, 20, 90]), id=number))
    return found


@functools.cache
def alone(family: str, number: int) -> tuple[int, ...]:
    return engine_of(family).generate([texts()[number]])[0].tokens


def one_mix(engine: Engine, draw: random.Random) -> dict[int, tuple[tuple[int, ...], bool]]:
    """What a few requests are answered that come and go while others run, and whether each was let
    finish."""
    left = draw.sample(range(len(texts())), draw.randint(2, 8))
    running: list[int] = []
    answers = {}
    while left or engine.busy:
        if left and (not engine.busy or draw.random() < 0.5):
            for _ in range(min(len(left), draw.choice([1, 1, 4]))):
                running.append(engine.add(texts()[left.pop()]))
        if running and draw.random() < 0.04:
            engine.abort(draw.choice(running))
        for event in engine.step():
            if isinstance(event, FinishEvent):
                done = event.completion
                running.remove(done.request.id)
                answers[done.request.id] = done.tokens, done.finish_reason != "aborted"
    return answers


def check(family: str, seeds: Iterable[int]) -> None:
    """Every answer is the one of the request alone, or where it was aborted begins like it."""
    engine = engine_of(family)
    before = dataclasses.replace(engine.stats)
    mixed = 0
    for seed in seeds:
        for number, (tokens, whole) in one_mix(engine, random.Random(seed)).items():
            wanted = alone(family, number)
            assert tokens == (wanted if whole else wanted[: len(tokens)]), (seed, number)
            mixed += 1
    assert mixed and engine.scheduler.pages.in_use == 0
    assert engine.scheduler.preemptions > 0
    assert engine.prefixes.hits > 0
    assert engine.stats.prefill_steps >= before.prefill_steps


@pytest.mark.usefixtures("no_forecast")
def test_rows_of_every_kind_say_in_mixed_steps_what_they_say_alone():
    """In caches that hold NaN wherever no row has written."""
    engine = engine_of("all")
    caches = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), engine.state.caches)
    engine._runner.state = dataclasses.replace(engine.state, caches=caches)
    engine.seal.hold((engine.state, engine._runner.rows))
    check("all", (69, 73))  # which preempt rows
    # Of the steps that these rows call; test_engine and test_speculate check the others.
    for name in ("prefill of 256 tokens beside 4 rows", "round of 4 rows: greedy"):
        check_aliasing(engine.executables[name], slack=0)


@pytest.mark.usefixtures("no_forecast")
def test_mixed_steps_of_sparse_attention_copy_no_cache():
    """Of their pages the prompts' choice is read before the rows write the keys of theirs."""
    engine = engine_of("sparse")
    step = engine.executables["prefill of 256 tokens beside 4 rows"]
    check_aliasing(step, slack=0)


@pytest.mark.slow(reason="300 mixes of each family; the test above has a few of all kinds together")
@pytest.mark.parametrize("family", ["mla", "gqa", "hybrid", "kimi"])
@pytest.mark.usefixtures("no_forecast")
def test_300_random_mixes_say_what_each_request_says_alone(family):
    check(family, range(MIXES))


def test_prompts_share_a_step_with_rows_that_decode():
    engine = engine_of("all")
    first = engine.add(dataclasses.replace(texts()[0], max_tokens=20))
    while not engine.scheduler.decoding.any():
        engine.step()
    sent, told = [], engine._runner.prefill
    engine._runner.prefill = lambda entry, packed, **options: (
        sent.append((entry, packed)) or told(entry, packed, **options)
    )
    try:
        others = [
            engine.add(Request(list(range(50)), max_tokens=3)),
            engine.add(Request(list(range(60, 0, -1)), max_tokens=3)),
        ]
        while engine.busy:
            engine.step()
    finally:
        del engine._runner.prefill
    assert {first, *others}
    [(entry, packed)] = sent  # one step reads both prompts, and the first row decodes in it
    assert str(entry) == "prefill of 256 tokens beside 4 rows"
    own = PromptLayout.of(FEW, 256).unpack_all(packed)[0]
    assert own.prompts.query_lens.tolist() == [50, 60]
    assert own.row_indices.tolist()[:3] == [0, 1, 2] and own.sources.tolist() == [-1, 0, 1, -1]


def test_sizes_that_no_row_decodes_in_have_no_rows():
    names = [str(step) for step in entry_points(LIMITS) if step.kind == "prefill"]
    assert names == [
        "prefill of 128 tokens beside 4 rows",
        "prefill of 256 tokens beside 4 rows",
        "prefill of 384 tokens",
    ]


def test_prompts_are_scored_beside_rows_that_decode_and_other_prompts():
    engine = engine_of("all")
    asked = [
        dataclasses.replace(each, max_tokens=3, prompt_logprobs=wanted)
        for each, wanted in zip(texts()[:6], (None, 2, None, 0, 1, 2), strict=True)
    ]
    engine.add(dataclasses.replace(texts()[0], max_tokens=60, id=100))
    while not engine.scheduler.decoding.any():
        engine.step()
    for each in asked:
        engine.add(each)
    done = {}
    while engine.busy:
        events = [event for event in engine.step() if isinstance(event, FinishEvent)]
        done |= {event.completion.request.id: event.completion for event in events}
    decoder = engine.model.bind(jax.device_put(drawn_params(engine.model)))
    forward = jax.jit(lambda tokens: jax.nn.log_softmax(decoder(tokens)))
    for each in asked:
        found, prompt = done[each.id].prompt_logprobs, np.asarray(each.prompt)
        assert len(found) == (0 if each.prompt_logprobs is None else len(prompt))
        whole = np.asarray(forward(jnp.asarray(np.pad(prompt, (0, 512 - len(prompt)))[None])))[0]
        for place, score in enumerate(found[1:]):
            assert score.token == pytest.approx(whole[place, prompt[place + 1]], abs=1e-4)
            assert len(score.top) == each.prompt_logprobs


def test_a_model_without_a_mixed_step_runs_its_two_others():
    blocks = (Block(dataclasses.replace(GROUPED, window=100), DENSE),)
    spec = DecoderSpec(vocab_size=64, stream=STREAM, blocks=blocks, max_position_embeddings=512)
    model, size = DecoderModel(spec), CacheSize(pages=4, slots=3)
    params = drawn_params(model)
    tables = np.int32([[0, 1, 2], [3, 0, 0], [3, 0, 0]])
    tokens = np.random.default_rng(0).integers(64, size=(3, 128), dtype=np.int32)
    prompts = PrefillBatch(
        tokens, np.int32([130, 0]), np.int32([130, 0]), tables[:2], np.int32([1, -1]),
        lines=np.int32([0, 0, 2]),
    )  # fmt: skip
    lens, slots = np.int32([1, 0, 0]), np.int32([0, -1, -1])
    rows = DecodeBatch(np.int32([[5], [0], [0]]), lens, tables[[1, 2, 2]], slots)
    found = []
    for mixed in (Model.mixed, DecoderModel.mixed):
        state = init_state(model, size, scratch_spec(model, 3, max_pages=3))
        step = jax.jit(functools.partial(mixed, model))
        logits, state, hidden = step(params, state, prompts, rows, np.int32([-1, 0, -1]))
        assert hidden.shape == (384, 16)
        found.append((logits[:2], hidden[:130], state.caches))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), *found)


def test_pieces_fill_the_size_that_is_worth_most():
    pieces = functools.partial(prompt_pieces, [256, 1024, 2048, 8192], line=128, rows=4)
    assert pieces([[8192]]) == (8192, [[8192]])
    assert pieces([[100]]) == (256, [[100]])
    assert pieces([[300, 300]]) == (1024, [[300, 300]])
    assert pieces([[1500]]) == (2048, [[1500]])  # not 1,024 and then 476
    assert pieces([[2148]]) == (2048, [[2048]])  # and then 100 by 256
    # The third has what is left: seven lines of 128 are taken.
    assert prompt_pieces([1024], [[300, 500, 600]], line=128, rows=4) == (1024, [[300, 500, 128]])
    whole = functools.partial(prompt_pieces, [1024], line=128, rows=4, whole_prompts=True)
    assert whole([[300, 600, 500, 20]]) == (1024, [[300, 600]])
    assert whole([[1024, 20], [300, 900, 500]]) == (1024, [[1024], [300, 0, 500]])
    assert pieces([[1, 1, 1, 1, 1]])[1] == [[1, 1, 1, 1]]
    assert pieces([[5], []]) == (256, [[5], []])


def test_a_packed_step_says_whose_every_token_is():
    limits = dataclasses.replace(LIMITS, mixed_tokens=None)
    layout = PromptLayout.of(limits, 384)
    pages = np.arange(limits.table_width)
    chunks = [
        PromptChunk(list(range(130)), 140, 2, 1, pages),
        PromptChunk([7, 8], 2, 0, -1, pages + 10),
    ]
    packed = layout.pack([chunks], np.array([3, 1, -1, -1]), np.array([-1, 0, -1, -1]))
    [own] = layout.unpack_all(jnp.asarray(packed))
    assert own.prompts.lines.tolist() == [0, 0, 1] and not layout.one_line_per_row
    assert own.prompts.layout.offsets.tolist() == [0, 256, 384, 384]
    assert own.prompts.layout.seq_lens.tolist() == [138, 140, 2]
    assert [layout.first_token(0, chunks[:n]) for n in range(3)] == [0, 256, 384]
    tokens, histories, lengths, news = by_lines(layout, jnp.asarray(packed))
    assert histories.tolist() == [1, 1, -1] and news.tolist() == [128, 2, 2]
    assert tokens[1, :2].tolist() == [128, 129] and lengths.tolist() == [138, 140, 2]
    one_line = own.prompts.in_one_line()
    assert one_line.tokens[0, :130].tolist() == list(range(130))
    assert one_line.tokens[1, :2].tolist() == [7, 8]


def test_a_reproducible_engine_gives_prompts_steps_of_their_own():
    limits = Limits(batch=2, prefill_rows=1, reproducible=True, decode_buckets=())
    assert not limits.mixes and not dataclasses.replace(LIMITS, mixed_tokens=0).mixes
    shared = dataclasses.replace(limits, prefill_rows=2, prefill_chunk=256)
    assert shared.prefill_sizes == (256,)
    assert dataclasses.replace(shared, prefill_tokens=512).prefill_sizes == (512,)
    small = dataclasses.replace(LIMITS, mixed_tokens=200, prefill_buckets=())
    assert small.prefill_sizes == (128, 256, 384) and small.mixed_sizes == (128,)
    assert LIMITS.mixes and LIMITS.mixed_sizes == (128, 256) and LIMITS.prefill_sizes[-1] == 384
    with pytest.raises(
        ValueError, match="mixed_tokens=64 processes prompts in steps that also decode"
    ):
        Limits(reproducible=True, mixed_tokens=64, prefill_rows=1)
