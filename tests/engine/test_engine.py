"""The engine: the plan before the allocation, continuous batching, and what a text depends on."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.aliasing.checker import check_aliasing
from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.outputs import Completion, GenerationInterrupted
from jaxattn.engine.requests.request import Request
from jaxattn.engine.scheduling.scheduler import Scheduler
from jaxattn.limits import Limits
from jaxattn.models.embedded.hybrid_model import Hybrid
from jaxattn.parallel import Parallel
from jaxattn.plan import PlanError
from tests.helpers.engine_cases import LIMITS, SMALLEST, kept_steps, params_of

PROMPTS = (
    b"class Stack:\n",
    b"x",
    b"def f(a, b):\n    return a",
    b"import os",
    b"if not ",
)


@pytest.fixture(scope="module")
def engine():
    kept_steps(LIMITS)
    live = sum(array.nbytes for array in jax.live_arrays())
    params = Hybrid(SMALLEST).init_params(jax.random.key(0))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    packed = Hybrid(SMALLEST).pack(params)
    given = {id(leaf) for leaf in jax.tree.leaves(params)}
    made = [leaf for leaf in jax.tree.leaves(packed) if id(leaf) not in given]
    packed_bytes = sum(array.nbytes for array in made)  # vectors, and matrices that were widened
    del packed, made
    engine = Engine(Hybrid(SMALLEST), params, LIMITS)
    # Compiled and planned, and beyond the weights nothing is allocated.
    assert sum(array.nbytes for array in jax.live_arrays()) - live <= weights + packed_bytes + 1024
    return engine


@pytest.fixture(autouse=True)
def nothing_is_left_in_use(engine):
    yield
    assert engine.scheduler.pages.in_use == engine.scheduler.slots.in_use == 0
    assert not engine.scheduler.rows and not engine.scheduler.waiting


def texts(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in completions]


def alone(engine: Engine, request: Request) -> tuple[int, ...]:
    (completion,) = engine.generate([request])
    return completion.tokens


def requests(count: int = 5, **options) -> list[Request]:
    """More than there are rows, of different lengths."""
    return [
        Request(PROMPTS[i % len(PROMPTS)], max_tokens=12 + 5 * i, id=i, **options)
        for i in range(count)
    ]


def test_the_plan_is_what_is_then_allocated(engine):
    plan, state = engine.plan, engine.state
    assert plan["kv cache"] == state.array("kv_cache").nbytes
    assert plan["arena"] == state.arena.nbytes
    memory = [compiled.memory_analysis() for compiled in engine.executables.values()]
    assert plan["xla temp"] == max(stats.temp_size_in_bytes for stats in memory)
    assert plan.total == sum(item.nbytes for item in plan.items)
    for stats in memory:
        held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        assert held + stats.temp_size_in_bytes <= plan.total


def test_every_region_of_the_arena_is_listed_and_lies_within_it(engine):
    (arena,) = [item for item in engine.plan.items if item.name == "arena"]
    assert [part.name for part in arena.parts] == [
        "mla_decode out",
        "mla_decode partial_out",
    ]
    assert max(part.nbytes for part in arena.parts) <= arena.nbytes
    assert all(item.why for item in engine.plan.items)


def test_the_compiled_steps_update_their_state_in_place(engine):
    for compiled in engine.executables.values():
        report = check_aliasing(compiled)
        assert report.aliased_bytes == report.donated_bytes > 0


def test_carried_buffers_stay_where_they_are_for_100_decode_steps(engine):
    def pointers():
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine.state)]

    before = pointers()
    engine.generate([Request(b"def ", max_tokens=101)])
    assert engine.stats.decode_steps == 100
    assert pointers() == before


def test_nothing_is_compiled_after_the_start(engine, caplog):
    engine.start()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        engine.generate(requests(temperature=0.7, top_p=0.9))
    assert "ompil" not in caplog.text


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}])
def test_a_text_does_not_depend_on_the_other_rows_or_on_its_own(engine, options):
    wanted = [alone(engine, request) for request in requests(3, **options)]
    assert len(set(wanted)) == 3
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        shuffled = [requests(3, **options)[i] for i in order]
        assert texts(engine.generate(shuffled)) == [wanted[i] for i in order]


def test_refilled_rows_write_what_they_write_alone(engine):
    completions = engine.generate(requests(7))
    assert [completion.finish_reason for completion in completions] == ["length"] * 7
    assert [len(completion.tokens) for completion in completions] == [
        request.max_tokens for request in requests(7)
    ]
    assert texts(completions) == [alone(engine, request) for request in requests(7)]


def test_what_the_pools_hold_before_does_not_matter(engine):
    wanted = texts(engine.generate(requests()))
    filled = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), engine.state)
    engine._runner.state = filled
    assert texts(engine.generate(requests())) == wanted


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}])
def test_a_text_fed_back_as_a_prompt_goes_on_the_same_way(engine, options):
    # Other chunks, other pages and steps, but the same tokens, positions and so the same draws.
    prompt = b"".join(PROMPTS)
    assert len(prompt) > 3 * LIMITS.prefill_chunk
    whole = alone(engine, Request(prompt, max_tokens=9, **options))
    assert engine.stats.prefill_steps == -(-len(prompt) // LIMITS.prefill_chunk)
    head, tail = whole[:5], whole[5:]
    assert alone(engine, Request([*prompt, *head], max_tokens=4, **options)) == tail


def test_tokens_are_called_back_in_order_as_they_are_generated(engine):
    seen, finished = {}, []
    completions = engine.generate(
        requests(),
        on_token=lambda request, token: seen.setdefault(request.id, []).append(token),
        on_finish=finished.append,
    )
    assert {i: tuple(tokens) for i, tokens in seen.items()} == dict(enumerate(texts(completions)))
    assert sorted(finished, key=lambda done: done.request.id) == completions
    for done in completions:
        assert 0 < done.seconds_to_first_token < done.seconds


def test_rows_go_on_while_another_reads_a_long_prompt(engine):
    # The third request, of four chunks, comes into the second's row.
    events = []
    engine.generate(
        [
            Request(b"a", max_tokens=40),
            Request(b"b", max_tokens=2),
            Request(b"c", max_tokens=2),
            Request(b"d" * 64, max_tokens=1),
        ],
        on_token=lambda request, token: events.append(request.id),
    )
    between = events[events.index(1, events.index(1) + 1) : events.index(3)]
    assert between.count(0) >= 3


def test_a_request_waits_for_pages_while_a_row_is_free(engine):
    # Two pages, two pages, one page: there are rows and slots for all, but not the pages of the
    # second's prompt, and the third, which would fit, does not overtake it.
    prompts = [b"a" * 70, b"b" * 70, b"c"]
    requests = [Request(prompt, max_tokens=20) for prompt in prompts]
    wanted = [alone(engine, request) for request in requests]
    order = []
    completions = engine.generate(
        requests, on_token=lambda request, token: order.append(request.id)
    )
    assert order[:20] == [0] * 20 and engine.stats.preemptions == 0
    assert texts(completions) == wanted


@pytest.mark.parametrize(
    "hopeless, reason",
    [
        (Request(b"y", max_tokens=250), "1 prompt tokens and 250 to generate need 4 pages of 64"),
        (Request(b"y" * 256), "the prompt has 256 tokens, which leaves none of the model length"),
        (Request([1, 256]), "the prompt has a token outside of 0 to 255"),
        (Request(b"y", logit_bias={256: 1.0}), "logit_bias has a token outside of 0 to 255"),
    ],
    ids=["pages", "model length", "vocabulary", "bias"],
)
def test_a_request_that_can_never_fit_is_refused_and_the_others_finish(engine, hopeless, reason):
    finished = []
    first, second, third = engine.generate(
        [requests()[0], hopeless, dataclasses.replace(requests()[2], id=None)],
        on_finish=finished.append,
    )
    assert second.finish_reason == "refused" and second.detail.startswith(reason)
    assert second.tokens == () and second in finished
    assert first.tokens == alone(engine, requests()[0])
    assert third.tokens == alone(engine, requests()[2])


def test_the_stop_token_ends_a_row_and_is_no_part_of_its_text(engine):
    request = Request(PROMPTS[0], max_tokens=30)
    free = alone(engine, request)
    stop = free[12]
    (done,) = engine.generate([dataclasses.replace(request, stop_tokens=stop)])
    assert done.finish_reason == "stop"
    assert done.tokens == free[: free.index(stop)]


def test_an_interrupt_loses_nothing_and_leaves_the_engine_usable(engine):
    wanted = texts(engine.generate(requests()))
    count = 0

    def interrupt_at_40(request, token):
        nonlocal count
        count += 1
        if count == 40:
            raise KeyboardInterrupt

    with pytest.raises(GenerationInterrupted) as caught:
        engine.generate(requests(), on_token=interrupt_at_40)
    completions = caught.value.completions
    # The other rows of the same step have a token that was not called back yet.
    assert 40 <= sum(map(len, texts(completions))) < 40 + LIMITS.batch
    for done, whole in zip(completions, wanted, strict=True):
        assert done.tokens == whole[: len(done.tokens)]
        assert done.finish_reason == ("length" if done.tokens == whole else "interrupted")
    assert completions[-1].tokens == ()
    assert texts(engine.generate(requests())) == wanted


def test_an_interrupt_in_on_finish_keeps_the_finished_request(engine):
    def interrupt(completion):
        raise KeyboardInterrupt

    with pytest.raises(GenerationInterrupted) as caught:
        engine.generate(requests(), on_finish=interrupt)
    assert sorted(done.finish_reason for done in caught.value.completions) == [
        *["interrupted"] * 4,
        "length",
    ]


def test_an_error_in_a_callback_frees_everything(engine):
    with pytest.raises(ZeroDivisionError):
        engine.generate(requests(), on_token=lambda request, token: 1 / 0)


def test_a_state_lost_to_an_interrupted_step_is_allocated_again(engine):
    wanted = texts(engine.generate(requests()))
    engine.state.array("kv_cache").delete()
    assert texts(engine.generate(requests())) == wanted


def test_the_counts_of_a_run_add_up(engine):
    completions = engine.generate(requests())
    stats = engine.stats
    assert stats.prompt_tokens == sum(len(done.request.prompt) for done in completions)
    assert stats.decoded_tokens == sum(map(len, texts(completions))) - len(completions)
    assert stats.decode_steps < stats.decoded_tokens
    assert 0 < stats.prefill_seconds < stats.seconds
    assert stats.prompt_tokens_per_second > 0 and stats.decoded_tokens_per_second > 0


def test_the_implementation_in_use_is_read_from_the_step(engine):
    # These head dimensions are not the kernels', on any device.
    assert engine.implementations == {"mla_decode": "xla"}


def test_a_row_ends_at_the_model_length():
    scheduler = Scheduler(Limits(batch=1, max_model_len=64), vocab_size=256)
    request = Request(b"x" * 50, max_tokens=100)
    assert scheduler.refusal(request) is None
    scheduler.submit(request)
    scheduler.admit()
    assert scheduler.rows[0].max_tokens == 14 and scheduler.num_remaining[0] == 14
    assert len(scheduler.rows[0].pages) == 1


def test_two_requests_cannot_share_an_id(engine):
    with pytest.raises(ValueError, match="requests 0 and 1 have the same id 1"):
        engine.generate([Request(b"a", id=1), Request(b"b", id=1)])


def test_a_plan_larger_than_the_device_is_refused_before_anything_is_compiled():
    with pytest.raises(PlanError, match="does not fit is the .*kv cache"):
        Engine(
            Hybrid(SMALLEST),
            params_of(SMALLEST),
            dataclasses.replace(LIMITS, num_pages=10**9),
            on_compile=lambda name, seconds: pytest.fail("compiled"),
        )


def test_a_model_length_beyond_the_models_is_refused():
    with pytest.raises(ValueError, match="max_model_len=257 exceeds .*=256"):
        Engine(Hybrid(SMALLEST), params_of(SMALLEST), Limits(max_model_len=257))


@pytest.mark.parametrize("field", ["batch", "max_model_len", "num_pages", "prefill_chunk"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_limits_are_positive_integers(field, value):
    with pytest.raises(ValueError, match=f"{field} must be a positive integer; got {value}"):
        Limits(**{field: value})


def test_limits_of_numpy_and_lists_are_those_of_python():
    given = Limits(batch=np.int64(2), max_model_len=np.int32(64), decode_buckets=[1, np.int8(2)])
    wanted = Limits(batch=2, max_model_len=64, decode_buckets=(1, 2))
    assert given == wanted and hash(given) == hash(wanted)
    assert type(given.batch) is int and type(given.decode_buckets[1]) is int
    assert Parallel(tensor=np.int64(2)) == Parallel(tensor=2)


def test_one_request_is_no_list_of_requests(engine):
    with pytest.raises(TypeError, match=r"requests must be a list of jaxattn.Request; write \[req"):
        engine.generate(Request(b"x"))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prompt": b""}, "prompt is empty"),
        (
            {"max_tokens": -1},
            "max_tokens must be at least 1, or 0 to process only the prompt; got -1",
        ),
        ({"temperature": -0.1}, "temperature must be 0 or more"),
        ({"temperature": np.nan}, "temperature must be 0 or more"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1; got 1.1"),
        ({"seed": 2**32}, "seed must be from 0"),
        ({"id": -1}, "id must be from 0"),
    ],
)
def test_a_request_that_makes_no_sense_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        Request(**{"prompt": b"x"} | options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prompt": "hello"}, r"got a str; for a byte-level model give prompt.encode\(\)"),
        ({"prompt": 5}, "prompt must be a sequence of token ids, got 5"),
        ({"prompt": [[1, 2]]}, r"prompt\[0\] must be an integer, got \[1, 2\]"),
        ({"prompt": [1, 2.5]}, r"prompt\[1\] must be an integer, got 2.5"),
        ({"prompt": np.ones(3)}, r"prompt must be integers \[T\], got float64 \(3,\)"),
        ({"prompt": {1, 2}}, "prompt must be a sequence of token ids"),
        ({"max_tokens": True}, "max_tokens must be an integer, got True"),
        ({"max_tokens": 2.5}, "max_tokens must be an integer, got 2.5"),
        ({"max_tokens": None}, "max_tokens must be an integer, got None"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"stop_tokens": "\n"}, "stop_tokens must be a sequence of integers"),
        ({"id": "a"}, "id must be an integer, got 'a'"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ],
)
def test_a_request_of_other_types_is_an_error_before_others_are_served(options, message):
    with pytest.raises(TypeError, match=message):
        Request(**{"prompt": b"x"} | options)


def test_a_request_of_numpys_numbers():
    request = Request(np.array([1, 2], np.uint8), max_tokens=np.int64(3), temperature=np.float32(1))
    assert list(request.prompt) == [1, 2]
