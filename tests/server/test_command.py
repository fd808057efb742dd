"""python -m jaxattn.serve --port: what starts it, what it refuses in a line, and how it ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import jax
import pytest

import jaxattn.server.uvicorn_server
from jaxattn.cli.options.serve_options import parser
from jaxattn.cli.serve.command import main
from jaxattn.cli.serve.request_inputs import model_length, read_limits
from jaxattn.cli.startup import compilation_cache
from jaxattn.cli.startup.engine_startup import share_of_device
from jaxattn.cli.startup.model_source import choose
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.limits import Limits
from jaxattn.models.checkpoint import native_format
from tests.helpers.engine_cases import FLOAT32, params_of
from tests.helpers.fresh_process import said_by_a_fresh_process
from tests.helpers.live_server import objects

ROOT = Path(__file__).parents[2]
# As tests/conftest.py has it: this process need not be fast, it has to be compiled in little time.
QUICK = {
    "XLA_FLAGS": "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PLATFORMS": "cpu",
    "JAXATTN_API_KEY": "sesame",
}
# `python -m jaxattn.serve` of an engine that compiles the steps which are called, and keeps them.
SERVE = """
from tests.helpers.lazy_steps import use_lazy_steps
use_lazy_steps(True, keep=True)
import runpy
runpy.run_module("jaxattn.serve", run_name="__main__")
"""


@pytest.fixture
def command(tmp_path):
    """(process, url) of a server in a process of its own."""
    model = tmp_path / "model"
    native_format.save(model, FLOAT32, params_of(FLOAT32))
    options = ["--port", "0", "--model", str(model), "--served-name", "snake"]
    options += ["--batch", "2", "--max-model-len", "128"]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, *options],
        env=os.environ | QUICK | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = []
    for line in process.stderr:
        said.append(line)
        if found := re.match(r"serving snake at (http://127\.0\.0\.1:\d+)/v1", line):
            break
    else:
        raise AssertionError("".join(said))
    yield process, found[1]
    process.kill()
    process.communicate()


def test_a_server_serves_and_sigterm_lets_its_answers_end(command, tmp_path):
    process, url = command
    headers = {"authorization": "Bearer sesame"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        assert client.get("/health").json() == {"status": "ready"}
        assert client.get("/v1/models").json()["data"][0]["id"] == "snake"
        body = {"prompt": "def add(", "max_tokens": 100, "stream": True, "temperature": 0}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_text()
            begun = next(pieces)
            process.send_signal(signal.SIGTERM)
            events = objects(begun + "".join(pieces))
    *_, last, usage = events
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == 100
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    [line] = [line for line in said.splitlines() if "/v1/completions" in line]
    assert json.loads(line)["tokens"] == 100 and "def add" not in said
    # What was compiled is kept for the next start.
    assert list((tmp_path / "jaxattn" / "compiled").glob("*/steps/*.step"))


def test_a_server_of_default_limits_has_at_most_16_executables():
    options = parser().parse_args(["--port", "0"])
    limits = read_limits(options, model_length(options, choose(options).folder.model))
    assert (limits.batch, limits.max_model_len, limits.checkpoints) == (16, 4096, 16)
    assert len(all_steps(limits)) <= 16


def limits_of(*arguments, platform="gpu"):
    options = parser().parse_args(arguments)
    length = model_length(options, choose(options).folder.model, platform)
    return read_limits(options, length, platform)


def test_what_no_option_says_is_left_open_for_the_device():
    everything = Limits().unset
    assert limits_of("--port", "0").unset == limits_of("--port", "0", platform="cpu").unset
    assert limits_of("--port", "0").unset == everything
    own = choose(parser().parse_args([])).folder.model.max_position_embeddings
    assert limits_of("--port", "0").max_model_len == own
    given = ["--batch", "8", "--max-model-len", "2k", "--prefill-rows", "2"]
    limits = limits_of("--port", "0", *given, "--decode-buckets", "0")
    assert everything - limits.unset == {"batch", "max_model_len", "prefill_rows", "decode_buckets"}
    assert limits.decode_buckets == () and limits.prefill_rows == 2
    # A terminal has no more rows than prompts.
    assert limits_of("--prompt", "a", "--prompt", "b").batch == 2
    assert "batch" not in limits_of("--prompt", "a", "--prompt", "b").unset
    assert limits_of("--chat").batch == 1
    assert limits_of("--prompt", "a", platform="cpu").batch == 4
    assert limits_of("--port", "0", "--no-prefix-cache").checkpoints == 0


def test_jax_takes_the_share_of_a_gpu_that_is_chosen():
    def share(*arguments):
        return share_of_device(parser().parse_args(arguments))

    assert share("--device", "cpu") is None
    assert share("--device", "cpu", "--utilization", "0.5") == 0.5
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    try:
        assert share() == 0.9 and share("--utilization", "0.5") == 0.5
        assert share("--num-pages", "8") is None
    finally:
        jax.config.update("jax_platforms", before)


def test_executables_are_kept_apart_by_what_they_run_on(tmp_path, monkeypatch):
    first = compilation_cache.own_folder({"XDG_CACHE_HOME": str(tmp_path)})
    assert first.parent == tmp_path / "jaxattn" / "compiled"
    assert compilation_cache.own_folder({"XDG_CACHE_HOME": str(tmp_path)}) == first
    others = {compilation_cache.own_folder({"XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": "--x"})}
    monkeypatch.setattr(compilation_cache, "processor", lambda: "another")
    others.add(compilation_cache.own_folder({"XDG_CACHE_HOME": str(tmp_path)}))
    monkeypatch.setattr(compilation_cache, "__version__", "9.9")
    others.add(compilation_cache.own_folder({"XDG_CACHE_HOME": str(tmp_path)}))
    assert len(others | {first}) == 4


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield str(other.getsockname()[1])


def refused(capsys, *arguments) -> str:
    assert main(list(arguments)) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_a_port_in_use_is_known_before_anything_is_compiled(taken, capsys):
    line = refused(capsys, "--port", taken)
    assert line.endswith(f"--host 127.0.0.1 --port {taken}: Address already in use")


@pytest.mark.parametrize(
    "option", [["--prompt", "x"], ["--chat"], ["--json"], ["--max-tokens", "5"]]
)
def test_options_of_the_terminal_do_not_go_with_a_port(option, capsys):
    assert f"{option[0]} applies only in the terminal" in refused(capsys, "--port", "0", *option)


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_what_is_no_port(port, capsys):
    assert "is not a port: use 0 to 65535" in refused(capsys, "--port", port)


def test_a_key_file_without_a_key(tmp_path, capsys):
    file = tmp_path / "keys"
    file.touch()
    assert "has no key" in refused(capsys, "--port", "0", "--api-key-file", str(file))
    assert refused(capsys, "--port", "0", "--api-key-file", str(tmp_path)).endswith(
        f"--api-key-file {tmp_path}: Is a directory"
    )
    line = refused(capsys, "--port", "0", "--api-key-file", str(tmp_path / "none"))
    assert "No such file" in line


def test_without_the_extra_a_port_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "jaxattn.server.uvicorn_server")
    monkeypatch.delattr(jaxattn.server, "uvicorn_server", raising=False)
    line = refused(capsys, "--port", "0")
    assert line.endswith(
        "--port needs uvicorn, which is not installed: pip install 'jaxattn[server]'"
    )


def test_importing_the_package_or_its_commands_imports_nothing_of_the_extra():
    assert said_by_a_fresh_process("imported of the extra").split() == []
