"""The flags of several processes, and what launchers set in their place."""

import shutil
import socket
from pathlib import Path
from typing import NoReturn

import jax
import pytest

from jaxattn.cli.options.parser import InputError
from jaxattn.cli.options.serve_options import parser
from jaxattn.cli.startup import multihost
from jaxattn.cli.startup.multihost import DistributedConfig, first_node, read_place
from jaxattn.models.checkpoint import EMBEDDED
from jaxattn.models.checkpoint.fingerprint import fingerprint

SLURM = {
    "SLURM_STEP_NODELIST": "gpu[003-006,010],cpu1",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
}
SECOND = ["--processes", "2", "--process", "1", "--coordinator", "host-0:1234"]
WORKER = {"LWS_LEADER_ADDRESS": "v3-0.v3.ns", "LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2"}


def place(*flags: str, environment: dict[str, str] | None = None) -> DistributedConfig | None:
    return read_place(parser().parse_args(flags), environment or {})


def test_flags_say_which_process_this_is():
    found = place(*SECOND)
    assert found == DistributedConfig(1, 2, "host-0:1234") and found.meeting == "host-0:1235"
    assert DistributedConfig(0, 2, "host-0:1234").meeting == "0.0.0.0:1235"


def test_one_process_joins_nobody():
    assert place() is None
    assert place("--processes", "1", "--process", "0", "--coordinator", "host-0:1") is None


def test_launchers_say_it_too_and_a_flag_goes_before_them():
    assert place("--cluster", "slurm", environment=SLURM) == DistributedConfig(2, 4, "gpu003:1234")
    assert place("--cluster", "kubernetes", environment=WORKER) == DistributedConfig(
        1, 2, "v3-0.v3.ns:1234"
    )
    flags = ["--cluster", "slurm", "--coordinator", "10.0.0.1:99"]
    assert place(*flags, environment=SLURM) == DistributedConfig(2, 4, "10.0.0.1:99")
    job = ["--cluster", "kubernetes", "--processes", "4", "--coordinator", "v3-0:99"]
    assert place(*job, environment={"JOB_COMPLETION_INDEX": "3"}) == DistributedConfig(
        3, 4, "v3-0:99"
    )


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("host", "host"),
        ("a,b", "a"),
        ("gpu[003-006,010],cpu1", "gpu003"),
        ("rack[1-2]-n[07,09]", "rack1-n07"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    "flags, environment, message",
    [
        (["--processes", "2"], {}, "--process and --coordinator is missing"),
        (["--cluster", "slurm"], {}, "SLURM_STEP_NODELIST' is not set; start it with srun"),
        (["--cluster", "kubernetes"], {}, "neither LWS_LEADER_ADDRESS"),
        (["--cluster", "kubernetes"], {"JOB_COMPLETION_INDEX": "0"}, "--processes and --coord"),
        (["--processes", "2", "--process", "2", "--coordinator", "a:1"], {}, "numbered from 0"),
        (["--processes", "2", "--process", "1", "--coordinator", "a"], {}, "HOST:PORT; got 'a'"),
        (
            [*SECOND, "--compile-cache", "kept"],
            {},
            "--compile-cache stores executables of a single",
        ),
        (
            ["--cluster", "kubernetes", "--utilization", "0.9"],
            WORKER,
            "all hosts need the same number; give --num-pages",
        ),
    ],
)
def test_what_is_missing_or_contradicts_the_rest_is_named(flags, environment, message):
    with pytest.raises(InputError, match=message):
        place(*flags, environment=environment)


def test_a_process_whose_leader_does_not_come_ends_with_one_line(monkeypatch):
    class Ended(BaseException):
        pass

    def end(message: str) -> NoReturn:
        raise Ended(message)

    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(multihost, "end_process", end)
    kept = []
    monkeypatch.setattr(multihost, "disable_compilation_cache", lambda: kept.append("nothing"))
    with socket.socket() as taken:  # and so nobody listens there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1] - 1
        with (
            pytest.raises(Ended, match=f"no connection to the leader at 127.0.0.1:{port + 1}"),
            multihost.joined(DistributedConfig(1, 2, f"127.0.0.1:{port}"), timeout=0.2),
        ):
            pytest.fail("it goes on alone")
    assert kept == ["nothing"]


def test_another_training_of_a_model_has_another_fingerprint(tmp_path: Path):
    same, other = tmp_path / "same", tmp_path / "other"
    for folder in (same, other):
        shutil.copytree(EMBEDDED, folder)
    assert fingerprint(same) == fingerprint(EMBEDDED)
    file = other / "model.safetensors"
    with file.open("r+b") as opened:  # all of its numbers, as training changes them
        opened.seek(file.stat().st_size // 2)
        opened.write(bytes(file.stat().st_size // 2))
    assert fingerprint(other) != fingerprint(EMBEDDED)
