"""Which requests wait so that the rows do not outgrow the pool, and for how long."""

import random

import numpy as np

from jaxattn import Limits, Request
from jaxattn.engine.scheduling.admission import FIRST, AnswerLengths, peak_growth
from jaxattn.engine.scheduling.scheduler import Scheduler


def scheduler(**limits):
    return Scheduler(Limits(**{"batch": 8, "max_model_len": 256} | limits), vocab_size=256)


def served(found, requests, lengths=None):
    """Serves requests whose answers have these lengths; returns how many rows ran at a time."""
    for request in requests:
        found.submit(request)
    ran = []
    while found.busy:
        found.admit()
        ran.append(len(found.rows))
        for row in found.next_prompts(8):
            found.read(row, len(row.prompt) - int(found.cached[row.index]))
        while not found.grow(found.next_decode()):
            found.preempt()
        places = found.next_decode()
        moved = np.zeros(found.limits.batch, np.int32)
        moved[places] = 1
        found.sent(moved)
        for row in list(found.rows.values()):
            row.tokens.append(1)
            length = row.max_tokens if lengths is None else lengths[row.order]
            if len(row.tokens) >= length or found.num_remaining[row.index] == 0:
                if row.request.may_stop:
                    found.answers.ended(len(row.tokens))
                found.release(row)
    assert found.pages.in_use == 0
    return ran


def test_rows_of_known_lengths_never_lose_their_pages():
    draw = random.Random(3)
    for pages in (5, 9, 14):
        found = scheduler(num_pages=pages)
        requests = [
            Request(b"x" * draw.randint(1, 120), max_tokens=draw.randint(1, 130)) for _ in range(60)
        ]
        assert max(served(found, requests)) > 1
        assert found.preemptions == 0


def test_rows_that_end_soon_leave_their_pages_to_one_that_starts_now():
    """Three pages at the end of each row, but not of all at one time."""
    found = scheduler(num_pages=5)
    early, late = Request(b"x" * 120, max_tokens=10), Request(b"x" * 60, max_tokens=120)
    assert max(served(found, [early, late])) == 2
    assert served(found, [late, late])[0] == 1
    assert found.preemptions == 0


def test_a_request_that_may_stop_is_expected_to_be_as_long_as_others_were():
    def rows(stop_tokens, ended=()):
        found = scheduler(num_pages=8)
        for length in ended:
            found.answers.ended(length)
        for _ in range(8):
            found.submit(Request(b"x" * 30, max_tokens=220, stop_tokens=stop_tokens))
        found.admit()
        return len(found.rows)

    assert rows(()) == 2  # of four pages each
    assert rows((1,)) == 2  # nothing is known, and FIRST is more than they may generate
    assert rows((1,), ended=[20] * 4) == 8
    assert rows((1,), ended=[80] * 4) == 4


def test_the_expectation_is_the_mean_of_the_longer_answers():
    lengths = AnswerLengths()
    left = np.array([1000, 1000, 1000, 5])
    assert lengths.expected(np.array([0, 10, FIRST, 0]), left).tolist() == [
        FIRST,
        FIRST - 10,
        FIRST,
        5,
    ]
    for length in (10, 20, 60):
        lengths.ended(length)
    assert lengths.expected(np.array([0, 10, 30, 100]), left).tolist() == [30, 30, 30, 5]
    assert lengths.expected(np.array([60]), np.array([1000])).tolist() == [60]


def test_growth_counts_what_rows_that_ended_leave_but_not_what_others_share():
    tokens, coming = np.array([64, 64]), np.array([64, 128])
    pages = np.array([1, 1])
    # The first row needs one more page and ends; the other then gets two, one of them from it.
    assert peak_growth(tokens, coming, pages, pages, 64) == 2
    assert peak_growth(tokens, coming, pages, pages - 1, 64) == 2
    assert peak_growth(tokens, np.array([0, 192]), pages, pages, 64) == 2
    assert peak_growth(tokens, np.array([0, 192]), pages, pages - 1, 64) == 3


def test_answers_that_outgrow_the_expectation_lose_nothing():
    found = scheduler(num_pages=6)
    requests = [Request(b"x" * 50, max_tokens=200, stop_tokens=(1,)) for _ in range(20)]
    lengths = [20] * 10 + [150] * 10
    served(found, requests, lengths)
    assert found.preemptions > 0


def test_the_last_token_of_a_row_takes_no_page():
    found = scheduler(num_pages=8)
    for _ in range(8):
        found.submit(Request(b"x" * 64, max_tokens=0, stop_tokens=(1,)))
    assert not found.waiting[0].request.may_stop  # nothing to learn of other answers from it
    found.admit()
    assert len(found.rows) == 8


def test_an_answer_is_expected_to_be_as_long_as_what_it_replays():
    found = scheduler(num_pages=7, reproducible=True)
    found.answers.ended(20)
    again = Request(b"x" * 30, max_tokens=110, stop_tokens=(1,), replay=[2] * 100)
    for _ in range(4):
        found.submit(again)
    found.admit()
    assert len(found.rows) == 2  # of three pages each


def test_a_row_that_read_a_prefix_first_shares_it_as_others_do():
    found = scheduler(num_pages=20)
    for _ in range(2):
        found.submit(Request(b"x" * 130))
        found.admit()
        for row in found.next_prompts(8):
            found.read(row, 130 - int(found.cached[row.index]))
    assert found.num_shared_pages[:3].tolist() == [2, 2, 0]
