"""The start of `serve` with one engine over several processes.

    serve --processes 2 --process 0 --coordinator host-0:1234 --tensor 16       on host-0
    serve --processes 2 --process 1 --coordinator host-0:1234 --tensor 16       on host-1
    srun ... serve --cluster slurm --tensor 16                                  on both

Process 0 accepts requests, and the others execute its commands. JAX's processes connect through the
coordinator's port, and the engine's through the next port.
"""

import argparse
import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jaxattn import __version__
from jaxattn.cli.options.parser import InputError
from jaxattn.cli.startup.compilation_cache import NONE
from jaxattn.cli.startup.model_source import ModelSource, one_line
from jaxattn.engine.compilation.executable_cache import disable_compilation_cache
from jaxattn.engine.distributed.process_group import ProcessGroup, end_process
from jaxattn.engine.distributed.transport import HostError, host_and_port
from jaxattn.limits import Limits
from jaxattn.models.checkpoint.fingerprint import fingerprint
from jaxattn.parallel import Parallel
from jaxattn.parallel.nccl_comm_split_flag import disable_comm_split

PORT = 1234
HEARTBEAT_SECONDS = 100  # JAX's timeout; the process group's is shorter and its errors say more


class DistributedConfig(NamedTuple):
    """The place of a process among those of an engine."""

    rank: int
    processes: int
    coordinator: str

    @property
    def meeting(self) -> str:
        """The address at which the engine's processes connect."""
        host, port = host_and_port(self.coordinator)
        return f"{'0.0.0.0' if self.rank == 0 else host}:{port + 1}"


def read_place(
    options: argparse.Namespace, environment: Mapping[str, str]
) -> DistributedConfig | None:
    """Returns the place of this process; None for a single process.

    Raises:
        InputError: If an option is missing, or contradicts the others.
    """
    process_settings: dict[str, Any] = {"process": None, "processes": None, "coordinator": None}
    if options.cluster == "slurm":
        process_settings = _of_slurm(environment)
    elif options.cluster == "kubernetes":
        process_settings = _of_kubernetes(environment)
    for name in process_settings:
        given = getattr(options, name)
        process_settings[name] = process_settings[name] if given is None else given
    if options.cluster is None and all(value is None for value in process_settings.values()):
        return None
    if missing := [f"--{name}" for name, value in process_settings.items() if value is None]:
        raise InputError(
            f"{' and '.join(missing)} is missing: several processes need --processes, --process "
            "and --coordinator, or --cluster if the launcher sets them"
        )
    config = DistributedConfig(
        process_settings["process"], process_settings["processes"], process_settings["coordinator"]
    )
    if not 0 <= config.rank < config.processes:
        raise InputError(
            f"--process {config.rank} must be less than --processes {config.processes}; processes "
            "are numbered from 0"
        )
    try:
        host_and_port(config.coordinator)
    except ValueError as error:
        raise InputError(f"--coordinator: {error}") from error
    if options.utilization is not None and config.processes > 1:
        raise InputError(
            "--utilization chooses the number of pages separately on each host, but all hosts "
            "need the same number; give --num-pages"
        )
    if options.compile_cache not in (None, NONE) and config.processes > 1:
        raise InputError(
            "--compile-cache stores executables of a single process, but several processes "
            "compile together at every start; leave it out"
        )
    return config if config.processes > 1 else None


@contextlib.contextmanager
def joined(config: DistributedConfig | None, **options: Any) -> Iterator[ProcessGroup | None]:
    """Starts JAX's distributed runtime and yields the process group. Enter it before JAX sees a
    device.

    An exception inside the context ends all processes with one line, and so does a process that
    does not connect. At the end, the leader tells the others that it is done.

    Args:
        options: Keyword arguments of `ProcessGroup`.
    """
    if config is None:
        yield None
        return
    disable_comm_split(os.environ)  # must precede any backend; `initialize` raises if one runs
    jax.distributed.initialize(
        config.coordinator,
        config.processes,
        config.rank,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    disable_compilation_cache()
    try:
        if config.rank == 0:
            process_group = ProcessGroup.leading(config.meeting, config.processes, **options)
        else:
            process_group = ProcessGroup.following(config.meeting, config.rank, **options)
    except HostError as error:
        end_process(one_line(error))
    with process_group.together():
        yield process_group
    process_group.close()


def facts(model_source: ModelSource, limits: Limits, parallel: Parallel) -> dict[str, str]:
    """Returns the facts that all processes must share, by the names that errors use."""
    path = model_source.folder.path
    return {
        "jaxattn": __version__,
        "JAX": jax.__version__,
        "layout": parallel.flags or "one GPU",
        "configuration": hashlib.sha256(repr(model_source.folder.model).encode()).hexdigest()[:12],
        "checkpoint": f"{model_source.name} {path.name}"
        if model_source.name
        else fingerprint(path),
        "limits": repr(limits),
        "devices": f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}",
    }


def _of_slurm(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the place from the environment of `srun`: one process per task, led by the first
    node."""
    try:
        nodes = environment["SLURM_STEP_NODELIST"]
        rank, processes = environment["SLURM_PROCID"], environment["SLURM_STEP_NUM_TASKS"]
    except KeyError as error:
        raise InputError(f"--cluster slurm: {error} is not set; start it with srun") from error
    return {
        "process": int(rank),
        "processes": int(processes),
        "coordinator": f"{first_node(nodes)}:{PORT}",
    }


def _of_kubernetes(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the place in a LeaderWorkerSet, or only the process's number in an indexed Job."""
    if leader := environment.get("LWS_LEADER_ADDRESS"):
        return {
            "process": int(environment["LWS_WORKER_INDEX"]),
            "processes": int(environment["LWS_GROUP_SIZE"]),
            "coordinator": f"{leader}:{PORT}",
        }
    index = environment.get("JOB_COMPLETION_INDEX")
    if index is None:
        raise InputError(
            "--cluster kubernetes: neither LWS_LEADER_ADDRESS of a LeaderWorkerSet nor "
            "JOB_COMPLETION_INDEX of an indexed Job is set"
        )
    return {"process": int(index), "processes": None, "coordinator": None}


def first_node(nodes: str) -> str:
    """Returns the first node of a Slurm node list such as "gpu[003-006,010],cpu1"."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)
