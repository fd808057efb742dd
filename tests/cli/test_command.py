"""How the commands end when their input or output cannot be used."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxattn.cli.exit_codes import code_of, exit_code
from jaxattn.cli.options.parser import InputError
from jaxattn.cli.plan import main as plan
from jaxattn.cli.serve.command import main as serve
from jaxattn.engine.requests.outputs import GenerationInterrupted
from jaxattn.interrupt import Terminated


def of(error):
    def run():
        raise error

    return exit_code("python -m name", run)


@pytest.mark.parametrize(
    "error, code, said",
    [
        (InputError("--batch is odd"), 2, "python -m name: error: --batch is odd\n"),
        (OSError(28, "No space left"), 2, "python -m name: error: No space left\n"),
        (OSError(2, "No such file", "x.json"), 2, "python -m name: error: x.json: No such file\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (Terminated(), 143, "interrupted\n"),
    ],
)
def test_one_line_and_a_code(error, code, said, capfd):
    assert of(error) == code
    assert capfd.readouterr().err == said


def test_a_generation_that_sigterm_ended():
    try:
        try:
            raise Terminated
        except KeyboardInterrupt as interrupt:
            raise GenerationInterrupted([]) from interrupt
    except KeyboardInterrupt as interrupt:
        assert code_of(interrupt) == 143
    assert code_of(GenerationInterrupted([])) == 130


def command(*arguments, **options):
    line = [sys.executable, "-m", *arguments]
    return subprocess.run(line, stderr=subprocess.PIPE, text=True, timeout=120, **options)


ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parents[1] / "data" / "tiny_checkpoints" / "deepseek_v3"
PLAN = ("jaxattn.plan", str(FOLDER), "--json")


def test_a_reader_that_left(tmp_path):
    """In a process that prints as a command does, and imports less: JAX's takes three seconds."""
    (tmp_path / "printing.py").write_text(
        "from jaxattn.cli.exit_codes import exit_code\n"
        "raise SystemExit(exit_code('python -m printing', lambda: print('{}') or 0))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = command("printing", stdout=pipe, env=environment)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow(reason="an exit code of 0; found by a reader that left too")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_no_room_for_the_output():
    with open("/dev/full", "w") as full:
        done = command(*PLAN, stdout=full)
    assert done.returncode == 2
    assert done.stderr == "python -m jaxattn.plan: error: No space left on device\n"


def test_a_closed_stdout(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after `>&-`
    assert plan([*PLAN[1:]]) == 1
    said = "python -m jaxattn.plan: error: stdout is closed; redirect it to a file or a pipe\n"
    assert capsys.readouterr().err == said


def test_a_terminal_that_knows_no_unicode(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert exit_code("python -m name", lambda: print("a \u2588 bar") or 0) == 0
    assert out.buffer.getvalue() == b"a ? bar\n"


def test_an_error_that_is_not_about_files_keeps_its_traceback():
    with pytest.raises(OSError, match="Cannot allocate memory"):
        of(OSError(12, "Cannot allocate memory"))


def test_a_closed_stdin(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it after `<&-`
    assert serve(["--prompt", "-"]) == 2
    assert capsys.readouterr().err.endswith("error: --prompt - reads stdin, but stdin is closed\n")


@pytest.mark.slow(
    reason="a traceback of the command; found by the same config in test_damaged_folders, and "
    "codes of other errors there too"
)
def test_a_config_nested_too_deeply(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    done = command("jaxattn.plan", str(tmp_path))
    assert done.returncode == 2 and done.stderr.endswith("config.json: it is nested too deeply\n")
