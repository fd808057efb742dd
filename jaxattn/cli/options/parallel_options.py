"""The options of the layout over several GPUs, which `serve` and `plan` share."""

import argparse

from jaxattn.cli.options.parser import InputError
from jaxattn.cli.options.value_types import size
from jaxattn.parallel import Parallel

LAYOUT = {
    "data": "data-parallel groups of GPUs, each with its own rows",
    "tensor": "tensor parallelism: GPUs that divide heads, columns and the vocabulary",
    "context": "context parallelism: GPUs of a group that divide the pages of each row",
    "expert": "expert parallelism: GPUs that divide the experts",
}


def add_layout(group: argparse._ActionsContainer) -> None:
    """Adds --data, --tensor, --context and --expert, which `read_layout` reads."""
    for name, what in LAYOUT.items():
        group.add_argument(f"--{name}", metavar="N", type=size, default=1, help=what)


def read_layout(options: argparse.Namespace) -> Parallel:
    """Returns the layout over GPUs.

    Raises:
        InputError: If the numbers do not form a valid layout.
    """
    try:
        return Parallel(
            data=options.data,
            tensor=options.tensor,
            context=options.context,
            expert=options.expert,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
