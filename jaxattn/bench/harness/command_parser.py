"""The option parser of a bench with its own command, and options that several benches share."""

import argparse

from jaxattn.cli.options.parser import ProseHelpFormatter
from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.hopper.device import require_hopper


def command_parser(program: str, what: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of `program what`, whose help begins with the description."""
    return argparse.ArgumentParser(
        prog=f"{program} {what}", description=description, formatter_class=ProseHelpFormatter
    )


def add_implementation(parser: argparse.ArgumentParser) -> None:
    """Adds the option that `check_implementation` reads."""
    parser.add_argument(
        "--implementation",
        choices=("mosaic_gpu", "xla"),
        help="which kernels run (default: the best)",
    )


def check_implementation(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a message if the device cannot run the requested kernels."""
    if args.implementation == "mosaic_gpu":
        try:
            require_hopper("--implementation mosaic_gpu", interpret=False)
        except Refusal as error:
            parser.error(str(error))
