"""Ctrl-C ends a command with 130 and one line, from the package's first import on."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from jaxattn import __main__, interrupt
from jaxattn.interrupt import interrupts_raised

ROOT = Path(__file__).parents[2]
MODULES = ("jaxattn.serve", "jaxattn.plan", "jaxattn.bench", "jaxattn serve")

# What stands in for JAX, so that the signal comes while it is imported.
IN_A_DESTRUCTOR = """
import os, signal, time
class Lost:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)
Lost()
"""
IN_A_LIBRARY = """
import hashlib, os, signal, threading
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # runs no Python for minutes, as a compiler
"""
GOES_ON = """
import os, signal, sys
os.kill(os.getpid(), signal.SIGINT)
sys.exit("went on")
"""
CLOSED = """
import os, sys
try:
    os.fstat(1)
except OSError:
    sys.exit("1 is closed")
"""


def run(tmp_path, jax, *arguments, before=()):
    """(exit code, stderr) of Python with another jax."""
    (tmp_path / "jax.py").write_text(jax)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [*before, sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=20,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("jax", [IN_A_DESTRUCTOR, IN_A_LIBRARY], ids=["destructor", "library"])
@pytest.mark.parametrize("module", MODULES)
def test_while_jax_is_imported(module, jax, tmp_path):
    assert run(tmp_path, jax, "-m", *module.split()) == (130, "interrupted\n")


def test_the_list_of_commands_imports_no_jax(tmp_path):
    assert run(tmp_path, GOES_ON, "-m", "jaxattn") == (0, "")


def test_an_installed_script(tmp_path):
    script = tmp_path / "jaxattn-serve"
    script.write_text("from jaxattn.serve import main\nmain()\n")
    assert run(tmp_path, IN_A_LIBRARY, str(script), "--prompt", "x") == (130, "interrupted\n")


def test_a_program_that_imports_the_package_keeps_its_own_ctrl_c(tmp_path):
    code, error = run(tmp_path, GOES_ON, "-c", "import jaxattn.arena")
    assert code == -signal.SIGINT and error.endswith("KeyboardInterrupt\n")


def test_a_command_in_the_background_ignores_ctrl_c_as_it_was_told(tmp_path):
    before = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    found = run(tmp_path, GOES_ON, "-m", "jaxattn.serve", before=before)
    assert found == (1, "went on\n")


def test_the_pipe_takes_the_place_of_no_closed_stream(tmp_path):
    before = ("sh", "-c", 'exec "$@" >&-', "sh")
    found = run(tmp_path, CLOSED, "-m", "jaxattn.serve", before=before)
    assert found == (1, "1 is closed\n")


@pytest.mark.parametrize(
    "given, own, name",
    [
        (["python", "-m", "jaxattn.plan", "x"], ["-m", "x"], "python -m jaxattn.plan"),
        (["python", "-Im", "jaxattn.plan"], ["/x/__main__.py"], "python -m jaxattn.plan"),
        (["python", "-mjaxattn.plan"], ["-m"], "python -m jaxattn.plan"),
        (["python", "/x/bin/jaxattn-plan", "a"], ["/x/bin/jaxattn-plan", "a"], "jaxattn-plan"),
        (["python", "-m", "jaxattn", "plan", "x"], ["-m", "plan", "x"], "python -m jaxattn plan"),
        (["python", "-m", "pytest", "jaxattn.plan"], ["-m", "jaxattn.plan"], None),
        (["python"], [""], None),
        ([], ["x"], None),
    ],
)
def test_how_python_was_started(given, own, name, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", given)
    monkeypatch.setattr(sys, "argv", own)
    assert interrupt.started_as() == name
    assert interrupt.program("plan") == (name or "python -m jaxattn.plan")
    assert interrupt.program("serve") == "python -m jaxattn.serve"


def test_every_list_has_all_commands(capsys):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {f"jaxattn-{name}" for name in interrupt.COMMANDS}
    assert __main__.main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(interrupt.COMMANDS) + 1
    for name, line in zip(interrupt.COMMANDS, printed, strict=False):
        assert line.startswith(f"python -m jaxattn.{name} ") and name in printed[-1]


@pytest.mark.parametrize("command", interrupt.COMMANDS)
def test_a_command_as_the_first_argument_runs(command, capsys):
    for arguments, code in ((["--version"], 0), (["--no-such-option"], 2)):
        with contextlib.suppress(SystemExit):  # of argparse, with the code
            assert __main__.main([command, *arguments]) == code
        found = capsys.readouterr()
        assert ("jaxattn" in found.out, "--no-such-option" in found.err) == (not code, bool(code))


def test_a_word_that_is_no_command(capsys):
    for given in ("serv", "--model", "jaxattn.serve"):
        assert __main__.main([given, "serve"]) == 2
        error = capsys.readouterr().err
        assert f"{given!r} is not a command; " in error and error.count("\n") == 1


in_the_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals are the main's"
)


@pytest.fixture
def ends(monkeypatch):
    """A command's Ctrl-C, which here only counts what would have ended the process."""
    found = []

    def end(*_):
        found.append(True)

    monkeypatch.setattr(interrupt, "end_process", end)
    before = signal.signal(signal.SIGINT, end)
    yield found
    signal.signal(signal.SIGINT, before)


@in_the_main_thread
def test_an_interrupt_that_python_lost_is_raised_again(ends):
    with interrupts_raised() as asked:
        asked.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert asked.code == 130
        with pytest.raises(KeyboardInterrupt):
            asked.check()
    assert not ends and signal.getsignal(signal.SIGINT) is interrupt.end_process


@in_the_main_thread
def test_a_second_ctrl_c_ends_the_process(ends):
    with interrupts_raised():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert len(ends) == 1


@in_the_main_thread
def test_after_its_work_ctrl_c_does_not_change_a_command_s_exit_code(ends):
    interrupt.finished()
    signal.raise_signal(signal.SIGINT)
    assert not ends
