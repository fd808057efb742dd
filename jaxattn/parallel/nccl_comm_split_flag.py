"""XLA's flag that splits NCCL's communicators, which must be off for GPUs of several processes.

XLA (of jax 0.11.2) may replace the communicator of some GPUs by one that it splits from that of
more GPUs. Two processes with two GPUs each then wait for each other forever. The backend reads the
flag once, when it starts, only from the environment, and for all programs of a process.
"""

from collections.abc import Mapping, MutableMapping
from pathlib import Path

VARIABLE = "XLA_FLAGS"
NAME = "--xla_gpu_enable_nccl_comm_splitting"
OFF = f"{NAME}=false"


def disable_comm_split(environment: MutableMapping[str, str]) -> None:
    """Turns splitting off, whatever the current flags say, before JAX initializes its devices."""
    if comm_split_enabled(environment):
        environment[VARIABLE] = f"{_flags(environment)} {OFF}".strip()


def comm_split_enabled(environment: Mapping[str, str]) -> bool:
    """Whether splitting is on, which is also the default without the flag."""
    said = [
        value
        for name, _, value in (flag.partition("=") for flag in _flags(environment).split())
        if name == NAME
    ]
    return not said or said[-1].lower() not in ("false", "0")


def _flags(environment: Mapping[str, str]) -> str:
    """Returns the flags; XLA reads them from a file if the value does not begin with a dash."""
    given = environment.get(VARIABLE, "").strip()
    if not given or given.startswith("-"):
        return given
    try:
        return Path(given).read_text()
    except OSError:
        return ""
