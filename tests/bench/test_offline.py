"""`bench offline`: whole requests of two engines by one client, and who wins, in words."""

import contextlib
import dataclasses
import io
import itertools
import json
import pathlib
import sys
import time

import pytest

from jaxattn import text
from jaxattn.bench.__main__ import main
from jaxattn.bench.harness.speedup_report import compared, ratio, summary, verdict
from jaxattn.bench.harness.subprocess_group import child_process
from jaxattn.bench.model.config_folder import (
    ARCHITECTURES,
    PUBLISHED_INSIDE,
    SMALL,
    write_folder,
)
from jaxattn.bench.model.model_lookup import find
from jaxattn.bench.offline import command, engine_process
from jaxattn.bench.offline.measures import MeasureError, measured, window
from jaxattn.bench.offline.workload import FIXED, SHAREGPT, OfflineWorkload
from tests.helpers.fake_vllm import write_packages
from tests.helpers.fresh_process import said_by_a_fresh_process

pytestmark = pytest.mark.lazy_steps


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of both engines: its JSON, and what it printed. vLLM's process runs a fake one."""
    folder = tmp_path_factory.mktemp("peer")
    write_packages(folder)
    file, run = folder / "run.json", command.run_process

    def started(job, lines, *rest):
        if json.loads(job.read_text())["engine"] == "vLLM":
            return run(job, lines, *rest)
        assert engine_process.main([str(job), str(lines)]) == 0
        return None

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", f"{folder}:.")
        patch.setattr(command, "run_process", started)
        code = main(["offline", "--small", "--mix", FIXED, "--json", str(file), "--repeats", "1"])
    assert code == 0
    return json.loads(file.read_text()), said.getvalue()


def test_both_engines_are_measured_at_the_same(ran):
    run, said = ran
    rows = {(row["what"], row["unit"]): row for row in run["rows"]}
    for key in (
        ("6 requests of 20 + 8", "s"),
        ("6 requests of 20 + 8", "output tok/s"),
        ("one prompt of 40", "ms"),
        ("decode step, B 1, T 64", "ms"),
    ):
        row = rows[key]
        assert row["jaxattn"] > 0 and row["vLLM"] > 0 and row["result"] in said.replace("\n", "")
        assert row["times as fast"] == ratio(row["jaxattn"], row["vLLM"], row["unit"])
    requests = rows["6 requests of 20 + 8", "s"]
    assert rows["6 requests of 20 + 8", "output tok/s"]["vLLM"] == pytest.approx(
        48 / requests["vLLM"]
    )
    assert rows["decode step, B 1, T 64", "ms"]["vLLM"] > 1  # its steps sleep a millisecond
    assert rows["decode step, B 3, T 64", "ms"]["jaxattn"] > 0
    told, lost = summary(run["rows"])
    assert all(each in said for each in (told, *lost))


def test_a_run_says_what_both_engines_were(ran):
    run, _ = ran
    assert run["what"] == "offline" and run["model"] == "small" and run["work"]["prompt"] == 20
    ours, theirs = run["engines"]["jaxattn"], run["engines"]["vLLM"]
    assert list(run["engines"]) == ["vLLM", "jaxattn"]  # in this order, on a card that warms up
    assert ours["options"]["batch"] == 4 and ours["sealed"] == "yes"
    assert theirs["version"] == "0.26.0" and theirs["options"]["max_num_seqs"] == 2
    memory = {row["what"]: row for row in run["rows"] if row["unit"] == "GB"}
    assert memory["memory, planned"]["vLLM"] == pytest.approx(9)
    assert "result" not in memory["memory, planned"]


def test_two_runs_are_compared_by_what_each_engine_took(ran, tmp_path, capsys):
    run, _ = ran
    slower = [
        row | {"jaxattn": row["jaxattn"] * 2} if "jaxattn" in row else row for row in run["rows"]
    ]
    for name, rows in (("a", run["rows"]), ("b", slower)):
        (tmp_path / f"{name}.json").write_text(json.dumps(run | {"rows": rows}))
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    said = capsys.readouterr().out
    assert "2.000" in said and "1.000" in said and "times as fast" not in said


@pytest.mark.slow(
    reason="a device that the parent's imports start; found by the imports of server/test_command, "
    "which start none, too"
)
def test_the_parent_leaves_the_device_to_the_engines():
    assert said_by_a_fresh_process("device of bench offline") == "False\n"


def test_what_an_engine_cannot_do_is_said_and_the_rest_is_measured(ran):
    run, said = ran
    [lost] = run["errors"]  # the fake has a batch of 2
    assert lost.startswith("vLLM, decode step, B 3, T 64: 3 rows decoded together for only 0 steps")
    assert lost in said.replace("\n", "")
    last = [row for row in run["rows"] if row["what"] == "decode step, B 3, T 64"]
    assert [set(row) for row in last] == [{"what", "unit", "jaxattn"}]


def test_requests_are_the_same_for_both_engines_and_other_ones_in_each_run():
    work = OfflineWorkload(requests=40, mixes=(FIXED, SHAREGPT))
    lengths = work.lengths(SHAREGPT)
    again = OfflineWorkload(requests=40).lengths(SHAREGPT)
    assert lengths == again and len(set(lengths)) > 30
    assert work.lengths(FIXED) == [(1024, 256)] * 40
    one, two = work.runs("a", lengths[:3], 256), work.runs("a", lengths[:3], 256)
    runs = list(one)
    assert runs == list(two) and len(runs) == 3
    prompts = [tuple(each.prompt) for run in runs for each in run]
    assert len(set(prompts)) == 9
    assert [(len(each.prompt), each.answer) for each in runs[0]] == lengths[:3]
    assert work.draw("b", lengths[:1], 256)[0] != runs[0][0]


class Steps:
    """An engine whose steps say which rows got tokens, and take no time."""

    name, vocab_size, longest = "scripted", 64, 50

    def generate(self, requests):
        for request in requests:
            assert len(request.prompt) + request.answer <= self.longest
            time.sleep(1e-4 * request.answer)


def test_a_step_is_timed_while_all_rows_decode():
    """Rows begin one after another; the last prompt's step takes longer, and does not count."""
    steps, now = [], 0.0
    for first in range(3):  # prompts
        now += 1.0
        steps.append((now, list(range(first + 1))))
    for _ in range(40):
        now += 0.002
        steps.append((now, [0, 1, 2]))
    found = window(steps, 3, 38)  # row 0 has 3 of its tokens before
    assert found.ms == pytest.approx(2.0) and found.steps == 35


def test_several_tokens_of_a_step_are_several_steps():
    steps = [(0.004 * number, [0, 1] * 4) for number in range(10)]
    found = window(steps, 2, 40)
    assert found.ms == pytest.approx(1.0) and found.steps == 36


def test_a_slow_third_is_not_the_time_of_a_step():
    gaps = [0.001] * 10 + [0.5] + [0.001] * 20
    steps = [(moment, [0]) for moment in itertools.accumulate(gaps)]
    assert window(steps, 1, 99).ms == pytest.approx(1.0)


def test_rows_that_never_run_together_are_an_error():
    steps = [(0.1 * number, [number // 10]) for number in range(30)]
    with pytest.raises(
        MeasureError, match="3 rows decoded together for only 0 steps.*1 rows had begun"
    ):
        window(steps, 3, 10)


def test_a_prompt_beyond_the_context_is_an_error_of_its_own():
    work = OfflineWorkload(prompts=(49, 50), requests=2, prompt=50, output=9, repeats=3)
    one, long, requests = measured(Steps(), work, ["prompt", "throughput"])
    assert (one["what"], one["unit"]) == ("one prompt of 49", "ms") and len(one["runs"]) == 3
    assert long["error"] == "51 tokens exceed the context of scripted, 50"
    assert requests["error"].startswith("59 tokens exceed the context")


def test_a_loss_is_named_as_plainly_as_a_win():
    ours = [
        {"what": "a", "unit": "s", "value": 2.0},
        {"what": "b", "unit": "output tok/s", "value": 300.0},
        {"what": "c", "unit": "ms", "value": 1.001},
        {"what": "d", "unit": "GB", "value": 5.0},
        {"what": "e", "unit": "s", "error": "no"},
    ]
    theirs = [
        {"what": each["what"], "unit": each["unit"], "value": value}
        for each, value in zip(ours, (1.5, 200.0, 1.0, 9.0, 1.0), strict=True)
    ]
    rows = compared(ours, theirs)
    assert [row.get("result") for row in rows] == [
        "jaxattn loses, 0.75 times as fast",
        "jaxattn wins, 1.50 times as fast",
        "jaxattn and vLLM are equally fast",
        None,
        None,
    ]
    assert rows[-1] == {"what": "e", "unit": "s", "vLLM": 1.0}
    assert summary(rows) == (
        "jaxattn is faster than vLLM in 1 of 3 measures and slower in 1.",
        ["a, s: jaxattn loses, 0.75 times as fast"],
    )
    assert summary(rows[1:])[0].endswith("slower in none.")
    assert "there is no comparison" in summary(compared(ours))[0]
    assert verdict(None) == ""


@pytest.mark.parametrize(
    "given, message",
    [
        ([], "give a MODEL, or --small"),
        (["--small", "Qwen3-32B"], "give a MODEL, or --small"),
        (["nobody"], "unknown model 'nobody'"),
        (["--small", "--engine", "vllm"], "--engine vllm: vLLM is not installed"),
        (["--small", "--engine", "both"], "pip install vllm==0.26.0"),
        (["--small", "--rows", "4", "0"], "--rows must be at least 1; got 0"),
        (["--small", "--seed", "-1"], "--seed must be at least 0; got -1"),
        (["--small", "--peer-options", "[1]"], "--peer-options must be a JSON object; got [1]"),
        (["--small", "--json", "/nowhere/a.json"], "--json /nowhere/a.json: cannot be written"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(given, message, capsys, monkeypatch):
    monkeypatch.setattr(command, "run_engine", None)
    with pytest.raises(SystemExit) as ended:
        main(["offline", *given])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_package_without_baselines_says_where_they_are(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jaxattn.bench.baselines.vllm_engine", None)
    with pytest.raises(SystemExit):
        command.parse(["--small", "--engine", "both"], "bench")
    assert "--engine both: other engines need a checkout" in capsys.readouterr().err


def test_an_engine_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    code = (
        "import pathlib, subprocess, sys, time\n"
        "started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(started.pid))\n"
        "time.sleep(60)\n"
    )
    with child_process([sys.executable, "-c", code], {}) as process:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
    assert process.returncode
    pid = int((tmp_path / "pid").read_text())
    for _ in range(500):  # its zombie is gone once the system has waited for it
        status = pathlib.Path(f"/proc/{pid}/stat")
        if not status.exists() or ") Z " in status.read_text():
            return
        time.sleep(0.01)
    pytest.fail("what the engine had started still runs")


@pytest.mark.parametrize(
    "code, limit, wrong",
    [
        ("pass", 30, None),
        ("raise SystemExit(3)", 30, "its process exited with code 3"),
        ("import time; time.sleep(60)", 0.2, "its process did not finish within --limit 0.2 s"),
    ],
)
def test_what_went_wrong_with_a_process_is_said(code, limit, wrong, tmp_path, monkeypatch):
    child = command.child_process
    monkeypatch.setattr(
        command, "child_process", lambda line, *rest, **more: child([line[0], "-c", code], *rest)
    )
    assert command.run_process(tmp_path / "a", tmp_path / "b", {}, limit) == wrong


def test_an_engine_that_fails_keeps_what_it_measured(tmp_path, monkeypatch, capsys):
    def failed(job, lines, *_):
        row = {"what": "start", "unit": "s", "value": 3.0}
        lines.write_text(json.dumps({"row": row}) + "\n")
        return "its process exited with code 137"

    monkeypatch.setattr(command, "run_process", failed)
    file = tmp_path / "run.json"
    assert main(["offline", "--small", "--json", str(file)]) == 1
    run = json.loads(file.read_text())
    assert run["rows"] == [{"what": "start", "unit": "s", "jaxattn": 3.0}]
    absent, ended = run["errors"]
    assert absent.startswith("Only jaxattn runs: vLLM is not installed")
    assert ended == "jaxattn: its process exited with code 137"
    assert ended in capsys.readouterr().out


def test_a_folder_opens_as_a_model_with_a_word_for_each_token(tmp_path):
    write_folder(tmp_path, SMALL)
    assert find(str(tmp_path))[2].vocab_size == 256
    tokenizer = text.load(tmp_path)
    assert tokenizer.vocab_size == 256 and tokenizer.encode("t3 t250") == [3, 250]
    stream = tokenizer.stream()
    assert [stream.push(token) for token in (3, 250)] == ["t3", " t250"]


def test_the_models_that_are_compared_have_their_architecture():
    for name in (
        "DeepSeek-V2-Lite GLM-4.7-Flash Qwen3.5-35B-A3B Qwen3-Next-80B-A3B-FP8 Qwen3-32B"
    ).split():
        own = find(name)[1]["model_type"]
        assert PUBLISHED_INSIDE.get(own, own) in ARCHITECTURES


def test_defaults_are_those_of_the_docs():
    args = command.parse(["--small", "--prompt", "30"], "bench")
    assert args.work == dataclasses.replace(command.TINY, prompt=30)
    args = command.parse(["Qwen3-32B"], "bench")
    assert args.work == OfflineWorkload() and args.choice.name == "Qwen3-32B"


def test_a_text_model_of_a_larger_one_is_written_inside_of_it(tmp_path):
    """As it is published: vLLM opens no other folder of Qwen3.5's."""
    fields = {"model_type": "qwen3_5_moe_text", "vocab_size": 4, "num_hidden_layers": 2}
    write_folder(tmp_path, fields)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "qwen3_5_moe" and written["text_config"] == fields
    assert written["architectures"] == ["Qwen3_5MoeForConditionalGeneration"]
    assert len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]) == 4
