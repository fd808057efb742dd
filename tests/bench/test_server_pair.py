"""`bench serve MODEL`: two servers that the bench starts, the same load, and who wins."""

import contextlib
import json
import os
import sys

import pytest

from jaxattn.bench.__main__ import main
from jaxattn.bench.harness import engine_options
from jaxattn.bench.load import server_pair, server_process
from jaxattn.bench.load.server_process import ServerStartError, command, started
from jaxattn.bench.model.config_folder import SMALL, write_folder
from tests.helpers.fake_vllm import ASKED, write_packages
from tests.helpers.live_server import live, served
from tests.helpers.scripted_engine import ScriptedEngine

SHORT = ["--requests", "8", "--warmup", "1", "--prompt-tokens", "9", "--answer-tokens", "12"]


@pytest.fixture
def pair(monkeypatch):
    """Engines in this process, in the place of servers that are started; each by its name."""
    engines = {name: ScriptedEngine(step_seconds=0.001) for name in ("jaxattn", "vLLM")}

    @contextlib.contextmanager
    def scripted(engine, folder, **_):
        assert (folder / "config.json").exists()
        with live(served(lambda: engines[engine])) as server:
            yield server.url, 2.5

    monkeypatch.setattr(server_process, "started", scripted)
    monkeypatch.setattr(engine_options, "peer_missing", lambda: None)
    return engines


def test_both_servers_get_the_same_requests_at_the_same_rates(pair, tmp_path, capsys):
    file = tmp_path / "run.json"
    assert main(["serve", "--small", *SHORT, "--json", str(file)]) == 0
    run = json.loads(file.read_text())
    loads = {
        name: [row["load"] for row in run["engines"][name]["rows"]] for name in ("vLLM", "jaxattn")
    }
    assert loads["vLLM"] == loads["jaxattn"] and loads["vLLM"][0] == "128 at a time"
    top = run["engines"]["vLLM"]["rows"][0]["req/s"]
    rates = [float(load.split()[0]) for load in loads["vLLM"][1:]]
    assert rates == pytest.approx([top / 4, top / 2, top * 3 / 4, top], rel=0.01)
    ours, theirs = ([tuple(each.prompt) for each in engine.added] for engine in pair.values())
    assert sorted(ours) == sorted(theirs) and len(set(ours)) == len(ours) == 1 + 5 * 8
    rows = {(row["what"], row["unit"]): row for row in run["rows"]}
    for what in ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99"):
        row = rows[f"{loads['vLLM'][2]}, {what}", "ms"]
        assert row["times as fast"] == row["vLLM"] / row["jaxattn"] and "jaxattn" in row["result"]
    assert rows["start", "s"]["result"] == "jaxattn and vLLM are equally fast"
    assert "measures and slower in" in capsys.readouterr().out


def test_rates_that_are_given_are_the_only_ones(pair, tmp_path):
    file = tmp_path / "run.json"
    given = ["--engine", "jaxattn", "--rates", "50", "80", "--json", str(file)]
    assert main(["serve", "--small", *SHORT, *given]) == 0
    run = json.loads(file.read_text())
    assert [row["load"] for row in run["engines"]["jaxattn"]["rows"]] == ["50 req/s", "80 req/s"]
    assert not pair["vLLM"].added and all("vLLM" not in row for row in run["rows"])


def test_shares_of_the_top_rate_can_be_chosen(pair, tmp_path):
    file = tmp_path / "run.json"
    assert main(["serve", "--small", *SHORT, "--shares", "0.5", "--json", str(file)]) == 0
    first, second = json.loads(file.read_text())["engines"]["vLLM"]["rows"]
    assert float(second["load"].split()[0]) == pytest.approx(first["req/s"] / 2, rel=0.01)


def options(limit):
    return {
        "peer_options": {"max_num_seqs": 8, "enforce_eager": True},
        "environment": {},
        "limit": limit,
    }


def test_a_server_is_started_prepared_and_ended(tmp_path, monkeypatch):
    """vLLM's, of which a fake one is started with the command and prepared as the real one is."""
    write_packages(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "Tiny").mkdir()
    write_folder(tmp_path / "Tiny", SMALL)
    with started("vLLM", tmp_path / "Tiny", **options(30)) as (url, seconds):
        assert 0 < seconds < 30 and url.startswith("http://127.0.0.1:")
    asked = json.loads((tmp_path / ASKED).read_text())
    assert (asked["path"], asked["body"]) == ("/collective_rpc", {"method": "set_ordinary_weights"})
    given = asked["given"]
    assert given["--served-model-name"] == "Tiny" and given["--load-format"] == "dummy"
    assert "--enforce-eager" in asked["argv"]
    assert given["--max-num-seqs"] == "8" and url.endswith(given["--port"])
    with pytest.raises(OSError):
        os.kill(asked["pid"], 0)


@pytest.mark.parametrize(
    "code, limit, message",
    [
        ("print('no room'); raise SystemExit(3)", 30, "exited with code 3\n  no room"),
        ("import time; time.sleep(60)", 0.1, "was not ready after --limit 0.1 s"),
    ],
)
def test_a_server_that_does_not_start_says_its_last_lines(
    code, limit, message, tmp_path, monkeypatch
):
    line = [sys.executable, "-c", code], {}
    monkeypatch.setattr(server_process, "command", lambda *_: line)
    with pytest.raises(ServerStartError) as failed, started("jaxattn", tmp_path, **options(limit)):
        pass
    assert f"jaxattn's server {message}" in str(failed.value)


def test_our_server_has_its_default_options(tmp_path):
    line, environment = command("jaxattn", tmp_path, 8123, {})
    assert line[1:] == [
        "-m", "jaxattn.bench.load.random_server", str(tmp_path), "--port", "8123",
    ] and not environment  # fmt: skip


def test_a_start_that_fails_makes_the_code_2(monkeypatch, capsys):
    @contextlib.contextmanager
    def failing(*_, **__):
        raise ServerStartError("jaxattn's server exited with code 1")
        yield

    monkeypatch.setattr(server_process, "started", failing)
    assert main(["serve", "--small", *SHORT]) == 2
    assert "serve: error: jaxattn's server exited" in capsys.readouterr().err


def test_a_load_that_failed_has_no_times_to_compare():
    rows = [{"load": "3 req/s", "ok": 0, "failed": 4}]
    assert server_pair.measures(rows) == [] and server_pair.top_rates(rows[0], (1.0,)) == []


@pytest.mark.parametrize(
    "given, message",
    [
        (["http://a", "--url", "http://b", "--rates", "1"], "give http://a or --url http://b"),
        (["http://a", "--rates", "1", "--engine", "vllm"], "--engine, --peer-options and --sh"),
        (["--small", "--rates", "1", "--shares", "1"], "leave --rates and --concurrency out"),
        (["Qwen3-32B", "--chat"], "--chat needs a URL, but Qwen3-32B is a model"),
        (["--small", "--model", "x"], "--model needs a URL, but --small is a model"),
        (["--small", "--engine", "both"], "--engine both: vLLM is not installed"),
        (["nobody"], "unknown model 'nobody'"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(given, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", *given])
    assert ended.value.code == 2 and message in capsys.readouterr().err
