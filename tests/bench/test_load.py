"""python -m jaxattn.bench serve: the load that was asked for, and times that are not flattered."""

import json
import math
import statistics

import numpy as np
import pytest

from jaxattn.bench.__main__ import main
from jaxattn.bench.load.client import RequestOutcome
from jaxattn.bench.load.metrics import measured, percentile
from jaxattn.bench.load.workload import LEAST, MOST, LengthDistribution, texts
from tests.helpers.live_server import live, served
from tests.helpers.scripted_engine import ScriptedEngine

SHORT = ["--requests", "8", "--warmup", "1", "--prompt-tokens", "9", "--answer-tokens", "12"]


def bench(server, *arguments) -> int:
    return main(["serve", "--url", server.url, *map(str, arguments)])


def test_lengths_are_spread_as_those_of_chats_and_come_again():
    asks = list(LengthDistribution().asks(2000, seed=3, prompt_of=texts(4.0)))
    assert asks == list(LengthDistribution().asks(2000, seed=3, prompt_of=texts(4.0)))
    assert asks != list(LengthDistribution().asks(2000, seed=4, prompt_of=texts(4.0)))
    for values, median in (([a.tokens for a in asks], 90), ([a.answer for a in asks], 150)):
        assert LEAST <= min(values) and max(values) == MOST
        assert median * 0.85 < statistics.median(values) < median * 1.15
        assert statistics.mean(values) > 1.2 * statistics.median(values)
    assert all(abs(len(a.prompt) - 4 * a.tokens) <= 1 for a in asks)


def test_percentiles_are_values_that_were_seen():
    values = list(np.random.default_rng(0).normal(size=137))
    for percent in (1, 50, 90, 99, 100):
        found = percentile(values, percent)
        assert found == np.percentile(values, percent, method="inverted_cdf")
    assert math.isnan(percentile([], 50))


def test_times_count_from_when_a_request_was_due():
    late = RequestOutcome(
        due=10.0, sent=12.0, ended=14.0, chunks=[13.0, 13.5, 14.0], prompt=5, answer=3
    )
    lost = RequestOutcome(due=10.0, sent=10.0, ended=11.0, error="status 500")
    row = measured("1 req/s", [late, lost])
    assert (row["ok"], row["failed"]) == (1, 1)
    assert row["TTFT p50 ms"] == 3000 and row["ITL p99 ms"] == 500 and row["E2E p50 ms"] == 4000
    assert row["TPOT p50 ms"] == 500
    assert row["late p99 ms"] == 2000 and row["out tok/s"] == 0.75 and row["all tok/s"] == 2.0


def test_chunks_that_come_together_make_no_token_faster():
    chunks = [1.0, 1.0, 1.8, 1.8, 2.6, 2.6]
    whole = RequestOutcome(due=0.5, sent=0.5, ended=2.6, chunks=chunks, answer=6)
    single = RequestOutcome(due=0.5, sent=0.5, ended=1.0, chunks=[1.0], answer=1)
    row = measured("1 req/s", [whole, single])
    assert row["ITL p50 ms"] == 0 and row["TPOT p50 ms"] == pytest.approx(320)


def test_a_run_counts_every_token_and_keeps_its_rate(tmp_path):
    engine, file = ScriptedEngine(step_seconds=0.001), tmp_path / "run.json"
    with live(served(lambda: engine)) as server:
        assert bench(server, *SHORT, "--rate", 40, "--concurrency", 1, 4, "--json", file) == 0
        run = json.loads(file.read_text())
        assert run["model"] == "model" and 0.9 < run["characters per token"] < 1.1
        open_, one, four = run["rows"]
        assert [row["load"] for row in run["rows"]] == ["40 req/s", "1 at a time", "4 at a time"]
        for row in run["rows"]:
            assert row["ok"] == 8 and row["failed"] == 0
            assert row["out tok/s"] * row["s"] == pytest.approx(96)
            assert row["TTFT p50 ms"] <= row["TTFT p99 ms"] <= row["E2E p99 ms"]
        assert four["req/s"] > one["req/s"]
        assert 3 < open_["req/s"] < 400
        assert server.quiet()
        asked = engine.added[-8:]
        assert {request.max_tokens for request in asked} == {12}
        assert all(request.stop_tokens == () and request.temperature == 0 for request in asked)


def test_a_picture_of_a_run(tmp_path):
    pytest.importorskip("matplotlib")
    with live(served(ScriptedEngine)) as server:
        assert (
            bench(server, *SHORT, "--chat", "--concurrency", 2, "--plot", tmp_path / "a.png") == 0
        )
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_requests_that_fail_are_counted_and_make_the_code_1(tmp_path, capsys):
    file = tmp_path / "run.json"
    with live(served(ScriptedEngine), max_waiting=0) as server:
        server.service.worker.engine.step_seconds = 0.005
        assert bench(server, *SHORT, "--concurrency", 8, "--json", file) == 1
    [row] = json.loads(file.read_text())["rows"]
    assert row["ok"] >= 4 and row["failed"] == 8 - row["ok"]
    assert "status 429: " in capsys.readouterr().err


def test_what_is_no_server_is_said_in_a_line(capsys):
    assert main(["serve", "http://127.0.0.1:9", "--rates", "1"]) == 2
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
    with live(served(ScriptedEngine), keys=("sesame",)) as server:
        assert bench(server, "--rate", 1) == 2
    assert "lists no model" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--rate", "0"], ["--concurrency", "-1"]])
def test_a_load_is_asked_for(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 2 and "--" in capsys.readouterr().err
