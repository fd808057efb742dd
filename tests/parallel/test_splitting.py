"""XLA's flag that splits communicators of NCCL is off where several processes meet."""

import jax
import pytest

from jaxattn.cli.startup import multihost
from jaxattn.parallel.nccl_comm_split_flag import (
    NAME,
    OFF,
    VARIABLE,
    comm_split_enabled,
    disable_comm_split,
)
from tests.helpers.fresh_process import said_by_a_fresh_process


@pytest.mark.parametrize(
    "flags, splits",
    [
        (None, True),
        ("", True),
        ("--xla_dump_to=/tmp", True),
        (NAME, True),
        (f"{NAME}=true", True),
        (f"{OFF} {NAME}=true", True),
        (OFF, False),
        (f"{NAME}=0", False),
        (f"--xla_dump_to=/tmp {NAME}=true {OFF} --x", False),
        ("/no/such/file", True),
    ],
)
def test_the_last_of_the_flags_decides_and_is_off_afterwards(flags, splits):
    environment = {} if flags is None else {VARIABLE: flags}
    assert comm_split_enabled(environment) is splits
    before = dict(environment)
    disable_comm_split(environment)
    assert not comm_split_enabled(environment)
    if not splits:
        assert environment == before
    elif flags and flags.startswith("-"):
        assert environment[VARIABLE] == f"{flags} {OFF}"
    else:
        assert environment[VARIABLE] == OFF


def test_flags_in_a_file_are_kept(tmp_path):
    file = tmp_path / "flags"
    file.write_text("--xla_dump_to=/tmp\n")
    environment = {VARIABLE: str(file)}
    assert comm_split_enabled(environment)
    disable_comm_split(environment)
    assert environment[VARIABLE].split() == ["--xla_dump_to=/tmp", OFF]
    file.write_text(f"--xla_dump_to=/tmp\n{OFF}\n")
    assert not comm_split_enabled({VARIABLE: str(file)})


def test_several_processes_never_split_and_one_is_left_as_it_is(monkeypatch):
    class Starts(Exception):
        pass

    def start(*_, **__):
        assert multihost.os.environ[VARIABLE].split() == ["--x=1", OFF]
        raise Starts

    monkeypatch.setenv(VARIABLE, "--x=1")
    monkeypatch.setattr(jax.distributed, "initialize", start)
    with multihost.joined(None):
        assert multihost.os.environ[VARIABLE] == "--x=1"
    with pytest.raises(Starts), multihost.joined(multihost.DistributedConfig(0, 2, "127.0.0.1:1")):
        pytest.fail("it starts without its processes")


def test_xla_reads_the_flag_when_its_backend_starts_though_jax_was_imported_before():
    said = said_by_a_fresh_process("flags of XLA").split(f"{NAME.removeprefix('--')}: ")[1:]
    assert said and all(each.startswith("false") for each in said)
