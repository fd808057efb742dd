"""Drafts by a model's own head: they change when tokens come, and never which."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import Engine, Limits, Request
from jaxattn.aliasing.checker import check_aliasing
from jaxattn.engine.requests.outputs import FinishEvent
from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.engine.steps.engine_state import cache_size, recurrent
from jaxattn.models.caches.layer_cache import CacheSize
from jaxattn.models.interface import PrefillBatch, init_state, scratch_spec
from jaxattn.models.loading.huggingface_checkpoint import load
from tests.helpers.draft_heads import VOCAB, write_folder
from tests.helpers.kernel_cases import slow

pytestmark = pytest.mark.lazy_steps

LIMITS = Limits(batch=3, max_model_len=192, prefill_chunk=64, prefill_rows=2, checkpoints=2,
                num_pages=8, speculate=1, speculate_by="mtp")  # fmt: skip
QWEN = "qwen3_5_text"  # whose rows have states, in slots that change
SLOW = pytest.mark.slow(
    reason="latents in the place of keys, and a guess behind a guess; found by test_draft_heads too"
)
FAMILIES = [QWEN, pytest.param("glm4_moe_lite", marks=SLOW)]


class FixedSwitch:
    """Drafts in every `period`-th step; 0 is never."""

    def __init__(self, period):
        self.period, self.step = period, 0

    def choose(self, bucket):
        self.step += 1
        return self.period > 0 and self.step % self.period == 0

    def observe(self, *told):
        pass


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    @functools.cache
    def made(model_type):
        folder = tmp_path_factory.mktemp(model_type)
        write_folder(folder, model_type, guesses_well=True)
        limits = dataclasses.replace(LIMITS, speculate=1 if model_type == QWEN else 2)
        engine = Engine(*load(folder, dtype="float32", draft_head=True), limits, strict=True)
        engine.start()
        # Warm-up ran every step twice on padding rows, which write nothing.
        assert not any(leaf.any() for leaf in jax.tree.leaves(engine.state.caches))
        return engine

    return made


def prompt(first, length):
    return [(5 * first + 3 * i) % VOCAB for i in range(length)]


MIXES = {
    "greedy, and more than rows": [
        Request(prompt(i, 3 + 29 * i), max_tokens=50 - 3 * i) for i in range(5)
    ],
    # The last of them filters, so all steps are of one level.
    "drawn": [
        Request(prompt(i, 9), max_tokens=most, temperature=0.7, top_p=p, seed=i)
        for i, (p, most) in enumerate([(1.0, 30), (1.0, 30), (0.8, 70)])
    ],
    "more of sampling, beside others": [
        Request(prompt(1, 9), max_tokens=40),
        Request(prompt(2, 9), max_tokens=10, logprobs=2),
        Request(prompt(3, 9), max_tokens=30, presence_penalty=0.5),
        Request(prompt(4, 9), max_tokens=30, logit_bias={5: 4.0}),
    ],
}


def run(engine, requests, period):
    engine._loop.switch = engine._loop._reader.switch = FixedSwitch(period)
    found = engine.generate([dataclasses.replace(each) for each in requests])
    assert engine.scheduler.slots.in_use == 0 and not engine.seal.counts
    return [(each.tokens, each.finish_reason) for each in found]


@pytest.mark.slow_cases(
    reason="a guess that is compared with the draw of another place; found by drawn rows in "
    "test_speculate too"
)
@pytest.mark.parametrize("mix", [slow(mix) if mix == "drawn" else mix for mix in MIXES])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_say_the_same_with_drafts_and_without(engine_of, family, mix):
    """Their prompts are found in the prefix cache from the second time on."""
    engine, requests = engine_of(family), MIXES[mix]
    plain = run(engine, requests, 0)
    assert engine.stats.drafted_tokens == 0
    assert run(engine, requests, 1) == plain
    assert engine.stats.guessed_tokens > 10
    if max(len(request.prompt) for request in requests) > 64:
        assert engine.stats.cached_tokens > 0
    assert run(engine, requests, 3) == plain
    assert engine.stats.guessed_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("no_forecast")
def test_rows_end_inside_a_draft_and_lose_pages_as_without(engine_of, family):
    engine = engine_of(family)
    [(whole, _)] = run(engine, [Request(prompt(1, 9), max_tokens=50)], 0)
    requests = [
        *(Request(prompt(1, 9), max_tokens=50, stop_tokens=[t]) for t in sorted(set(whole))[:6]),
        *(Request(prompt(1, 9), max_tokens=most) for most in range(1, 7)),
        *(Request(prompt(7 * i, 40), max_tokens=152) for i in range(3)),
    ]
    plain = run(engine, requests, 0)
    assert run(engine, requests, 1) == plain
    assert engine.stats.preemptions > 0


def test_a_step_that_drafts_updates_all_in_place(engine_of):
    executables = engine_of(QWEN).executables
    for name in executables:
        # A level between two others, which test_speculate has, has no buffer of its own.
        if name.startswith(("draft", "prefill", "round")) and not name.endswith(": draws"):
            report = check_aliasing(executables[name])
            assert report.aliased_bytes == report.donated_bytes > 0, name


def test_the_heads_layer_and_inputs_are_in_the_plan(engine_of):
    engine = engine_of(QWEN)
    assert engine.plan["kv cache"] == 2 * 8 * 2 * 64 * 32 * 4  # two layers of three, float32
    assert engine.plan["draft hidden"] == 3 * 2 * 32 * 4  # rows, tokens, features, float32
    held = jax.tree.leaves(engine._runner.state.caches)
    caches = ("kv cache", "draft hidden", "draft pairs", "conv state", "ssm state")
    assert sum(engine.plan[name] for name in caches) == sum(leaf.nbytes for leaf in held)


def test_inputs_of_a_head_are_no_recurrent_states(engine_of):
    model = engine_of(QWEN).model
    attention = tuple(cache for cache in model.caches if cache.name != "delta")
    assert len(attention) == 2 < len(model.caches)
    assert recurrent(model) and not recurrent(SimpleNamespace(caches=attention))
    cache, size = model.caches[-1], cache_size(LIMITS)
    arrays = cache.init(size)
    assert cache.copy_slots(arrays, np.array([0]), np.array([1])) is arrays


def test_the_head_caches_every_pair_once_whatever_step_gave_its_token(engine_of):
    """Of chunks of a prompt, of steps with drafts, and of steps beside another's prompt."""
    engine, pages = engine_of(QWEN), []
    engine._loop.switch = engine._loop._reader.switch = FixedSwitch(1)
    first = engine.add(Request(prompt(1, 70), max_tokens=60))
    done, mixed = {}, engine.stats.prefill_steps
    for step in range(100):
        if step in (8, 16):
            engine.add(Request(prompt(step, 110), max_tokens=9))
        pages = next(
            (r.pages for r in engine.scheduler.rows.values() if len(r.prompt) == 70), pages
        )
        ended = [event for event in engine.step() if isinstance(event, FinishEvent)]
        done |= {event.completion.request.id: event.completion.tokens for event in ended}
    tokens = np.array([*prompt(1, 70), *done[first]])
    assert engine.stats.prefill_steps - mixed >= 6 and len(tokens) == 130

    model, size = engine.model, CacheSize(pages=4, slots=1)

    @jax.jit
    def whole(params):
        state = init_state(model, size, scratch_spec(model, 1, max_pages=3))
        lens, slots = jnp.array([len(tokens) - 1]), jnp.zeros(1, jnp.int32)
        each = (
            PrefillBatch(jnp.array(x[None], jnp.int32), lens, lens, jnp.array([[0, 1, 2]]), slots)
            for x in (tokens[:-1], tokens[1:])
        )
        hidden, state = model.mixed_hidden(params, state, next(each), None)
        return model.draft_prompts(params, state, next(each), hidden).array("kv_cache")[-1]

    leaves, tree = engine._runner.weights, jax.tree.structure(packed_shapes(model))
    wanted = np.asarray(whole(jax.tree.unflatten(tree, leaves)))[:3]
    found = np.asarray(engine.state.array("kv_cache"))[-1][pages[:3]]
    both = [x.swapaxes(1, 2).reshape(3 * 64, -1)[: len(tokens) - 4] for x in (found, wanted)]
    np.testing.assert_allclose(*both, atol=1e-3, rtol=1e-3)
