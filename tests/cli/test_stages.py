"""What a start is said to take is what it took."""

import time

from jaxattn.cli.startup.stage_timings import StageTimings, executable_lines, since_start


def test_stages_add_up_to_the_time_since_the_process_began(tmp_path):
    stages = StageTimings()
    stages.ended("imports")
    time.sleep(0.05)
    stages.ended("device")
    assert abs(stages.total - since_start()) < 0.03
    assert stages.seconds["imports"] > 0 and 0.04 < stages.seconds["device"] < 1
    assert stages.line().startswith("ready ") and ": imports " in stages.line()


def test_without_the_system_s_word_the_time_is_that_since_the_import(tmp_path):
    for text in ("", "1 (a b) R 1", "1 (a b) R " + "x " * 40):
        (tmp_path / "stat").write_text(text)
        assert 0 < since_start(tmp_path / "stat") <= since_start() + 0.03
    assert since_start(tmp_path / "none") > 0


def test_executables_are_counted_and_named():
    head, names = executable_lines({"prefill": 1.23, "decode": 4.0}, 3 * 2**20)
    assert head == "2 executables, 3.0 MiB of code, in seconds:"
    assert names == "  prefill 1.2, decode 4.0"
    assert next(iter(executable_lines({"a": 1.0}, 0))) == "1 executables, in seconds:"
