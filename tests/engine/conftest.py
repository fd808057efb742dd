"""Fixtures of the engine's tests."""

import pytest

from jaxattn.engine.scheduling.scheduler import Scheduler


@pytest.fixture
def no_forecast(monkeypatch):
    """Requests are admitted as soon as there are pages for their prompts, so that rows outgrow the
    pool and lose their pages."""
    monkeypatch.setattr(Scheduler, "_fits", lambda *_: True)
