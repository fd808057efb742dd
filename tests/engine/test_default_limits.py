"""Limits that nobody fixed: what a device gets, what is lowered, and what never changes."""

import dataclasses
import functools
import itertools
import random

import pytest

from jaxattn import Engine, Limits
from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.engine.scheduling.chunked_prefill import prompt_pieces
from jaxattn.engine.startup import engine_build, limits_search
from jaxattn.engine.startup.default_limits import choose_limits, largest_steps
from jaxattn.engine.startup.executable_memory import ExecutableMemory
from jaxattn.engine.startup.memory_plan import packed_shapes, page_bytes
from jaxattn.engine.steps.step_catalog import all_steps, entry_points
from jaxattn.memory.device_memory import GIB, DeviceMemory, known_device
from jaxattn.memory.plan import PlanError, nbytes
from jaxattn.models import Hybrid
from jaxattn.models.catalog import model_resolver
from jaxattn.plan import plan
from tests.helpers.engine_cases import (
    CONFIG,
    FLOAT32,
    ONE_BY_ONE,
    kept_steps,
    params_of,
    random_requests,
)

pytestmark = pytest.mark.lazy_steps

LITE = model_resolver.load("DeepSeek-V2-Lite").model
QWEN = model_resolver.load("Qwen3.5-35B-A3B").model
H200 = known_device("h200")


def chosen(limits=None, memory=H200, model=LITE, **more):
    return choose_limits(model, limits or Limits(), memory, platform="gpu", **more)


# What is left open -------------------------------------------------------------------------------


def test_limits_say_what_nobody_fixed():
    assert Limits().unset == {
        "batch", "max_model_len", "prefill_chunk", "prefill_rows", "checkpoints",
        "decode_buckets", "prefill_buckets", "utilization",
    }  # fmt: skip
    given = Limits(batch=4, decode_buckets=(), checkpoints=0, num_pages=8)
    assert given.unset == {"max_model_len", "prefill_chunk", "prefill_rows", "prefill_buckets"}
    assert given == Limits(num_pages=8)  # until they are chosen
    assert Limits(batch=None, prefill_buckets=None) == Limits()
    assert Limits(batch=None).unset == Limits().unset
    assert "batch" not in dataclasses.replace(Limits(), batch=Limits().batch * 2).unset
    assert dataclasses.replace(Limits(), spread=2).unset == Limits().unset
    assert Limits(groups=3).batch == 6 and "batch" in Limits(groups=3).unset


def test_a_bucket_may_come_without_the_batch_that_is_chosen_for_it():
    open_batch = Limits(decode_buckets=(300,), prefill_buckets=(200,))
    for limits in (
        choose_limits(LITE, open_batch, None, platform="cpu").limits,
        chosen(open_batch).limits,
    ):
        assert limits.batch >= 300 and limits.prefill_chunk >= 200
    with pytest.raises(ValueError, match=r"decode_buckets=\(300,\) must be at most batch=4"):
        Limits(decode_buckets=(300,), batch=4)


# What a device gets ------------------------------------------------------------------------------


def test_a_gpu_gets_the_model_s_own_context_and_packed_prompts():
    choice = chosen()
    limits = choice.limits
    assert not limits.unset
    assert limits.max_model_len == LITE.max_position_embeddings
    assert (limits.batch, limits.utilization, limits.checkpoints) == (256, 0.9, 0)
    assert limits.decode_buckets == (1, 8, 32, 128)
    assert limits.prefill_sizes == (256, 1024, 2048, 4096, 8192) and limits.prompt_rows == 16
    assert limits.mixes and limits.mixed_sizes == (256, 1024, 2048, 4096)
    assert len(all_steps(limits)) <= 63  # each is compiled once, and the largest twice
    reasons = {reason.split()[0] for reason in choice.reasons}
    assert reasons >= {"batch", "max_model_len", "prefill_chunk", "prefill_rows", "utilization"}
    assert chosen(limits) == dataclasses.replace(choice, reasons=())  # nothing is chosen twice


def test_a_cpu_gets_what_is_quick_to_compile():
    small = choose_limits(LITE, Limits(), H200, platform="cpu").limits
    assert (small.batch, small.max_model_len, small.prefill_chunk) == (4, 1024, 128)
    assert len(all_steps(small)) <= 15
    assert small.utilization is None and not small.unset - {"utilization"}
    # So does a GPU of which nothing says how much memory it has, and a model that is shorter.
    assert choose_limits(LITE, Limits(), None, platform="gpu").limits == small
    short = choose_limits(Hybrid(CONFIG), Limits(), None, platform="cpu").limits
    assert short.max_model_len == CONFIG.max_position_embeddings


def test_states_leave_room_for_pages():
    limits = chosen(model=QWEN, memory=H200).limits
    assert limits.batch == 256 and 0 < limits.checkpoints <= limits.batch
    smaller = DeviceMemory("a GPU", 96 * GIB)
    less = chosen(model=QWEN, memory=smaller)
    assert less.limits.batch < 256 and "a third" in "".join(less.reasons)
    assert less.limits.max_model_len == QWEN.max_position_embeddings
    assert chosen(Limits(prefix_cache=False), model=QWEN).limits.checkpoints == 0
    assert chosen(Limits(checkpoints=3), model=QWEN).limits.checkpoints == 3


def test_given_pages_decide_the_context_and_no_share_of_the_device():
    limits = chosen(Limits(num_pages=40)).limits
    assert limits.num_pages == 40 and limits.utilization is None
    assert limits.max_model_len == 40 * PAGE_SIZE and limits.batch == 40


def test_rows_that_need_little_have_their_cache_whole():
    """Then no bound has to be looked into."""
    choice = chosen(Limits(batch=2, max_model_len=1024))
    assert choice.limits.utilization is None and choice.limits.pages == 32
    assert any(reason.startswith("pages 32: enough for all rows") for reason in choice.reasons)


# What does not fit -------------------------------------------------------------------------------


def of_tokens(byte):
    """Bounds of steps that take so many bytes a token or row."""

    def bounds(limits):
        most = max(entry.size for entry in entry_points(limits))
        return {"the largest": ExecutableMemory(0, byte * most, 0, "bound")}

    return bounds


def beside_weights(gib):
    """A device on which weights leave so many GiB of 0.9 of it."""
    weights = nbytes(packed_shapes(LITE))
    return DeviceMemory("a GPU", int((weights + gib * GIB) / 0.9))


def test_the_context_is_lowered_first_then_the_batch_then_the_chunk():
    page = page_bytes(LITE.caches)
    context = chosen(memory=beside_weights(3))
    limits = context.limits
    assert 4096 < limits.max_model_len < LITE.max_position_embeddings
    assert limits.batch == 256 and limits.prefill_chunk == 8192
    [reason] = [each for each in context.reasons if each.startswith("max_model_len")]
    assert f"{limits.max_model_len:,}" in reason and "the model supports 163,840" in reason

    # Steps whose temp leaves less than the shortest context: rows go, and then tokens of a step.
    tight = chosen(memory=beside_weights(3), bounds=of_tokens(2**19))
    limits = tight.limits
    assert limits.batch == 1 and limits.prefill_chunk < 8192 and limits.max_model_len >= 4096
    temp = of_tokens(2**19)(limits)["the largest"].temp
    assert temp + limits.pages_per_row * page < 3 * GIB
    assert any("fewer than a row needs" in each for each in tight.reasons)


def test_a_step_packs_fewer_prompts_if_all_else_was_given():
    given = Limits(batch=4, max_model_len=4096, prefill_chunk=1024)
    assert chosen(given).limits.prefill_tokens == 8192
    tight = chosen(given, memory=beside_weights(2), bounds=of_tokens(2**19))
    limits = tight.limits
    assert (limits.batch, limits.max_model_len, limits.prefill_chunk) == (4, 4096, 1024)
    assert 1024 <= limits.prefill_tokens < 8192
    temp = of_tokens(2**19)(limits)["the largest"].temp
    assert temp + limits.pages_per_row * page_bytes(LITE.caches) < 2 * GIB
    [reason] = [each for each in tight.reasons if each.startswith("prefill_tokens")]
    assert f"{limits.prefill_tokens:,}" in reason and "fewer than a row needs" in reason


def test_what_was_given_is_never_changed():
    draw = random.Random(3)
    sizes = {
        "batch": (1, 3, 64, 512),
        "max_model_len": (64, 1000, 8192, 163840),
        "prefill_chunk": (16, 128, 2048, 16384),
        "prefill_rows": (1, 2, 16),
        "prefill_tokens": (256, 4096),
        "decode_buckets": ((), (1,)),
        "prefill_buckets": ((), (8, 16)),
        "checkpoints": (0, 5),
        "utilization": (0.5, 0.95),
        "num_pages": (3, 5000),
        "speculate": (0, 2),
        "cache_format": ("auto",),
    }
    for case in range(20):
        names = draw.sample(sorted(sizes), draw.randrange(len(sizes)))
        given = {name: draw.choice(sizes[name]) for name in names}
        memory = draw.choice([H200, known_device("h100"), beside_weights(1), beside_weights(4)])
        model = draw.choice([LITE, QWEN])
        platform = draw.choice(["gpu", "gpu", "cpu"])
        found = choose_limits(
            model, Limits(**given), memory, platform=platform, bounds=of_tokens(2**12)
        ).limits
        assert {name: getattr(found, name) for name in given} == given, (case, given)
        assert not found.unset - {"utilization"}, (case, given)
        if "max_model_len" not in given:
            assert found.max_model_len <= model.max_position_embeddings
        assert found.prefill_sizes and len(all_steps(found)) <= 66
        assert {str(step) for step in largest_steps(found)} <= {str(s) for s in all_steps(found)}


@pytest.mark.usefixtures("untraced_bounds")
def test_a_length_that_was_given_and_does_not_fit_is_refused_with_what_would():
    with pytest.raises(PlanError) as refused:
        plan(LITE, beside_weights(1), Limits(max_model_len=163840, utilization=0.9))
    said = str(refused.value)
    assert "one row of 163,840 tokens needs 2,560" in said and "pages are left" in said
    assert "max_model_len" in said.partition("to make it fit, use")[2]


# Determinism is a switch -------------------------------------------------------------------------


def test_reproducible_has_one_shape_of_each_step():
    limits = chosen(Limits(reproducible=True)).limits
    assert limits.prefill_sizes == (1024,) and limits.batches == (256,)
    assert limits.prompt_rows == 16 and not limits.mixes
    assert limits.max_model_len == LITE.max_position_embeddings
    cut = LITE.with_batch_invariance()
    assert all(block.mixer.batch_invariant for block in cut.spec.blocks)
    assert not any(block.mixer.batch_invariant for block in LITE.spec.blocks)
    assert cut.with_batch_invariance() is cut and cut.param_shapes() == LITE.param_shapes()


@pytest.mark.parametrize(
    "given, said",
    [
        ({"decode_buckets": (1,)}, r"decode_buckets=\(1,\) adds shapes"),
        ({"prefill_buckets": (16,)}, r"prefill_buckets=\(16,\) adds shapes"),
        ({"speculate": 2}, "speculate=2 decodes several tokens per step"),
        ({"steps_per_round": 4}, "steps_per_round=4 runs several decode steps per round"),
    ],
)
def test_what_contradicts_reproducible_is_refused_by_name(given, said):
    with pytest.raises(ValueError, match=f"{said}.*reproducible=True.*leave one of them out"):
        Limits(reproducible=True, **given)
    with pytest.raises(ValueError, match="reproducible must be True or False; got 1"):
        Limits(reproducible=1)


# Sizes of prefill steps --------------------------------------------------------------------------


def test_a_step_of_prompts_has_no_more_tokens_than_it_may():
    packed = Limits(
        batch=16, max_model_len=8192, prefill_chunk=512, prefill_rows=8, prefill_buckets=(64,)
    )
    assert packed.prefill_sizes == (128, 512, 4096) and packed.prompt_rows == 8
    assert packed.mixed_sizes == packed.prefill_sizes
    assert dataclasses.replace(packed, prefill_tokens=1000).prefill_sizes == (128, 512, 1024)
    assert dataclasses.replace(packed, prefill_tokens=1).prefill_sizes == (128, 512)
    assert dataclasses.replace(packed, mixed_tokens=600).mixed_sizes == (128, 512)
    assert dataclasses.replace(packed, mixed_tokens=1).mixed_sizes == (128,)
    two = dataclasses.replace(packed, groups=2, prefill_tokens=256)
    assert two.prefill_sizes == (128, 512) and two.prompt_rows == 4
    short = dataclasses.replace(packed, prefill_chunk=50, prefill_buckets=(16,))
    assert short.line_tokens == 50 and short.prefill_sizes == (50, 400)
    # More than all prompts' chunks are never read.
    assert dataclasses.replace(short, prefill_tokens=8192).prefill_sizes == (50, 400)


@functools.cache
def like_a_gpu():
    return chosen().limits


def pieces(waiting):
    limits = like_a_gpu()
    sizes = limits.prefill_sizes
    return prompt_pieces(sizes, waiting, line=limits.line_tokens, rows=limits.prompt_rows)


@pytest.mark.parametrize(
    "waiting, size",
    [
        ([8192], 8192),
        ([1024] * 8, 8192),
        ([1024] * 20, 8192),
        ([20], 256),
        ([200] * 6, 2048),
        ([904], 1024),
        ([1500], 2048),
        ([3000], 4096),
        ([4200], 4096),
        ([5000], 4096),
        ([6200], 8192),
        ([8192, 20], 8192),
        ([100_000] * 3, 8192),
    ],
)
def test_a_step_reads_the_most_for_its_time(waiting, size):
    assert pieces([waiting])[0] == size


def test_every_prompt_is_read_in_the_end():
    draw = random.Random(5)
    for _ in range(50):
        left = [draw.randrange(1, 20_000) for _ in range(draw.randrange(1, 30))]
        for rounds in itertools.count():
            left = [each for each in left if each]
            if not left:
                break
            size, [read] = pieces([left])
            assert sum(-(-tokens // 128) * 128 for tokens in read) <= size
            read += [0] * (len(left) - len(read))
            left = [each - tokens for each, tokens in zip(left, read, strict=True)]
            assert rounds < 600


# An engine ---------------------------------------------------------------------------------------


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Engines choose as on a small GPU, and run on the CPU."""
    for name, value in {
        "BATCH": 4,
        "DECODE_BUCKETS": (2,),
        "PREFILL_TOKENS": 64,
        "PREFILL_ROWS": 4,
        "PREFILL_BUCKETS": (16,),
    }.items():
        monkeypatch.setattr(limits_search, name, value)

    def choose(*given, platform, **more):
        memory = DeviceMemory("a GPU", 4 * GIB)
        return choose_limits(given[0], given[1], memory, platform="gpu", **more)

    monkeypatch.setattr(engine_build, "choose_limits", choose)


@pytest.mark.usefixtures("untraced_bounds")
def test_an_engine_without_limits_answers_as_one_row_at_a_time(on_a_gpu):
    """In float32: prompts that are read together, and steps of fewer rows, give the same tokens.

    The engine and its plan also say what was chosen.
    """
    model, params = Hybrid(FLOAT32), params_of(FLOAT32)
    kept_steps(ONE_BY_ONE, config=FLOAT32)
    requests = [each for each in random_requests(random.Random(11), 12) if not each.temperature]
    with Engine(model, params, ONE_BY_ONE) as one, Engine(model, params, strict=True) as engine:
        limits = engine.limits
        assert limits.prefill_sizes == (64,) and limits.line_tokens == 64 and limits.mixes
        assert (limits.batch, limits.decode_buckets, limits.max_model_len) == (4, (2,), 256)
        assert engine.plan.limits == limits
        assert any(each.startswith("batch 4: ") for each in engine.plan.choices)
        planned = plan(model, DeviceMemory("a GPU", 4 * GIB), Limits())
        assert engine.plan.choices == planned.choices
        open_pages = {"num_pages": None, "utilization": None, "steps_per_round": None}
        whole = dataclasses.replace(planned.limits, **open_pages)
        assert whole == dataclasses.replace(limits, **open_pages)
        alone = {}
        for request in requests:
            [done] = one.generate([request])
            alone[tuple(request.prompt)] = done
        for done in engine.generate(requests):
            wanted = alone[tuple(done.request.prompt)]
            if wanted.finish_reason != "refused":
                assert done.tokens == wanted.tokens
        assert not engine.seal.counts
