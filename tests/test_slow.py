"""What is left to `--slow` says what it finds, and who finds it too."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest


def test_every_slow_case_that_was_collected_has_a_reason():
    """Of the whole suite where all of it runs."""
    assert conftest.WITHOUT_REASON == []


def test_a_reason_names_tests_that_there_are():
    files = [path.with_suffix("").as_posix() for path in Path(__file__).parent.rglob("test_*.py")]
    for reason in conftest.REASONS:
        for name in re.findall(r"(?:\w+/)*test_\w+", reason):
            assert any(file.endswith(f"/{name}") for file in files), f"no {name}.py: {reason}"


@pytest.mark.parametrize(
    "marks, reason",
    [
        ([pytest.mark.slow(reason="own")], "own"),
        ([pytest.mark.slow, pytest.mark.slow_cases(reason="the test's")], "the test's"),
        ([pytest.mark.slow(reason="own"), pytest.mark.slow_cases(reason="the test's")], "own"),
        ([pytest.mark.slow], None),
        ([pytest.mark.slow(reason=""), pytest.mark.sampled], None),
    ],
    ids=str,
)
def test_a_reason_is_the_cases_own_or_its_tests(marks, reason):
    def iter_markers(name):
        return (each.mark for each in marks if each.mark.name == name)

    assert conftest.why_slow(SimpleNamespace(iter_markers=iter_markers)) == reason


def test_a_test_that_takes_long_fails_unless_it_is_marked():
    most = conftest.MOST_TEST_SECONDS
    assert conftest.too_slow(most, {"sampled"}) is None
    assert f"took {most + 1} s of CPU time" in conftest.too_slow(most + 1, {"sampled"})
    for marker in ("gpu", "large", "slow"):
        assert conftest.too_slow(most + 1, {marker, "sampled"}) is None
