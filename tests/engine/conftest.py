"""Fixtures of the engine's tests."""

import math

import pytest

from jaxattn.engine.execution import overlap_loop
from jaxattn.engine.scheduling.scheduler import Scheduler


@pytest.fixture(autouse=True)
def no_long_steps(monkeypatch):
    """How many rounds are in flight does not depend on how long a CPU takes for a step."""
    monkeypatch.setattr(overlap_loop, "LONG_STEP", math.inf)


@pytest.fixture
def no_forecast(monkeypatch):
    """Requests are admitted as soon as there are pages for their prompts, so that rows outgrow the
    pool and lose their pages."""
    monkeypatch.setattr(Scheduler, "_fits", lambda *_: True)
