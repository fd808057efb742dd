"""The option parser of a bench that has a command of its own, and options that several have."""

import argparse

from jaxattn.cli.options.parser import ProseHelpFormatter
from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.hopper.device import require_hopper


def command_parser(program: str, what: str, description: str | None) -> argparse.ArgumentParser:
    """Of `program what`, whose help begins with the description."""
    return argparse.ArgumentParser(
        prog=f"{program} {what}", description=description, formatter_class=ProseHelpFormatter
    )


def add_implementation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--implementation",
        choices=("mosaic_gpu", "xla"),
        help="which kernels run (default: the best)",
    )


def check_implementation(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends with a message where the device does not run the kernels that are asked for."""
    if args.implementation == "mosaic_gpu":
        try:
            require_hopper("--implementation mosaic_gpu", interpret=False)
        except Refusal as error:
            parser.error(str(error))
