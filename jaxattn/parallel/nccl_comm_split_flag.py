"""XLA's flag that splits NCCL's communicators, which is off where GPUs of several processes meet.

XLA (of jax 0.11.2) may drop the communicator of some GPUs in favour of one that it splits from that
of more GPUs. Two processes with two GPUs each then wait for each other without end. The backend
reads the flag once, when it starts: from the environment alone, and for all programs of a process.
"""

from collections.abc import Mapping, MutableMapping
from pathlib import Path

VARIABLE = "XLA_FLAGS"
NAME = "--xla_gpu_enable_nccl_comm_splitting"
OFF = f"{NAME}=false"


def disable_comm_split(environment: MutableMapping[str, str]) -> None:
    """Turns splitting off, whatever the flags say of it, before JAX sees a device."""
    if comm_split_enabled(environment):
        environment[VARIABLE] = f"{_flags(environment)} {OFF}".strip()


def comm_split_enabled(environment: Mapping[str, str]) -> bool:
    """Whether the flags leave splitting on, as they do where they do not say."""
    said = [
        value
        for name, _, value in (flag.partition("=") for flag in _flags(environment).split())
        if name == NAME
    ]
    return not said or said[-1].lower() not in ("false", "0")


def _flags(environment: Mapping[str, str]) -> str:
    """XLA takes what does not begin with a dash for the name of a file of flags."""
    given = environment.get(VARIABLE, "").strip()
    if not given or given.startswith("-"):
        return given
    try:
        return Path(given).read_text()
    except OSError:
        return ""
