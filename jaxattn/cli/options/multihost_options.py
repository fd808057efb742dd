"""The options of `serve` for one engine over several processes; multihost.py reads them."""

import argparse

from jaxattn.cli.options.value_types import number, size


def add(root: argparse.ArgumentParser) -> None:
    """The group of options of several processes."""
    group = root.add_argument_group(
        "several hosts", "one engine over the GPUs of several processes; docs/several-gpus.md"
    )
    group.add_argument(
        "--processes", metavar="N", type=size, help="processes of the engine (default: 1)"
    )
    group.add_argument(
        "--process",
        metavar="I",
        type=number(int, lambda x: x >= 0, "a number of a process: use 0 or more"),
        help="number of this process; 0 takes requests (default: none)",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="host of process 0, and the first of two ports that are free there (default: none)",
    )
    group.add_argument(
        "--cluster",
        choices=("slurm", "kubernetes"),
        help="read these from what srun, a LeaderWorkerSet or an indexed Job sets (default: no)",
    )
