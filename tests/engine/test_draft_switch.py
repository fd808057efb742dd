"""The switch of a draft head, on devices whose steps take what a clock of the tests says."""

import random

import pytest

from jaxattn.engine.scheduling.draft_switch import LAST, TRIAL, DraftSwitch

AHEAD = 2  # steps that are sent before the first of them is read


class FakeDevice:
    """Steps of one bucket.

    Attributes:
        plain, drafting: seconds of a step.
        tokens: that a drafting one gives of a row.
        clock: seconds of all steps.
    """

    def __init__(self, plain, drafting, tokens, noise=0.0, bucket=4):
        self.plain, self.drafting, self.tokens = plain, drafting, tokens
        self.bucket, self.noise, self.random = bucket, noise, random.Random(0)
        self.clock = self.given = 0.0
        self.flights = []

    def run(self, switch, steps):
        """The ways that were chosen."""
        chosen = []
        for _ in range(steps):
            drafts = switch.choose(self.bucket)
            chosen.append(drafts)
            seconds = self.drafting if drafts else self.plain
            seconds *= 1 + self.noise * self.random.uniform(-1, 1)
            if self.noise and self.random.random() < 0.02:
                seconds *= 20  # the host was elsewhere
            self.flights.append((drafts, seconds, self.tokens if drafts else 1.0))
            if len(self.flights) > AHEAD:
                done = self.flights.pop(0)
                self.clock += done[1]
                self.given += done[2]
                switch.observe(self.bucket, *done)
        return chosen


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(
    ("drafting", "tokens", "best"), [(1.2, 1.8, True), (1.2, 1.1, False), (2.5, 1.9, False)]
)
def test_a_bucket_stays_with_what_gives_more_tokens(drafting, tokens, best, noise):
    device, switch = FakeDevice(1.0, drafting, tokens, noise), DraftSwitch()
    chosen = device.run(switch, 20_000)
    assert chosen[: 2 * TRIAL] == [True] * TRIAL + [False] * TRIAL
    assert chosen[4 * TRIAL : 8 * TRIAL] == [best] * 4 * TRIAL
    assert sum(way != best for way in chosen) < 0.02 * len(chosen)


def test_a_head_that_never_helps_costs_next_to_nothing():
    device, switch = FakeDevice(1.0, 1.5, 1.0), DraftSwitch()
    device.run(switch, 50_000)
    assert device.given / device.clock > 0.998
    before = device.clock
    device.run(switch, 2 * LAST)
    assert device.clock - before < 2 * LAST + 0.5 * 3 * TRIAL


def test_a_bucket_changes_when_what_helps_does():
    device, switch = FakeDevice(1.0, 1.2, 1.1), DraftSwitch()
    assert not device.run(switch, 3_000)[-1]
    device.tokens = 1.8  # texts that are guessed well
    assert device.run(switch, 2 * LAST)[-1]
    device.drafting = 2.0  # rows have become long
    assert not device.run(switch, 2 * LAST)[-1]


def test_buckets_are_switched_each_for_itself():
    switch = DraftSwitch()
    few, many = FakeDevice(1.0, 1.1, 1.6, bucket=1), FakeDevice(3.0, 6.0, 1.6, bucket=128)
    for _ in range(200):
        ways = few.run(switch, 1), many.run(switch, 1)
    assert ways == ([True], [False])
    assert {bucket: each.drafting for bucket, each in switch.buckets.items()} == {
        1: True, 128: False,
    }  # fmt: skip


def test_a_step_of_a_trial_that_nobody_observes_is_made_up_for():
    """A step that was sent ahead of a row's end tells no token, so nothing observes it."""
    switch, drafted = DraftSwitch(), 0
    for step in range(20_000):
        drafts = switch.choose(1)
        drafted += drafts
        if step != TRIAL + 4:
            switch.observe(1, drafts, 1.5 if drafts else 1.0, 1.0)
    assert drafted < 600
