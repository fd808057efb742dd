"""The options of `serve` for one engine over several processes, which multihost.py reads."""

import argparse

from jaxattn.cli.options.value_types import number, size


def add(root: argparse.ArgumentParser) -> None:
    """Adds the group of options for several processes."""
    group = root.add_argument_group(
        "several hosts", "one engine over the GPUs of several processes; docs/several-gpus.md"
    )
    group.add_argument(
        "--processes", metavar="N", type=size, help="number of processes (default: 1)"
    )
    group.add_argument(
        "--process",
        metavar="I",
        type=number(int, lambda x: x >= 0, "a process index: use 0 or more"),
        help="index of this process; process 0 accepts requests (default: none)",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="host of process 0, and the first of two consecutive free ports (default: none)",
    )
    group.add_argument(
        "--cluster",
        choices=("slurm", "kubernetes"),
        help="read the three options from the environment of srun, a LeaderWorkerSet or an indexed "
        "Job (default: no)",
    )
