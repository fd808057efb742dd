"""`python -m jaxattn`, which lists the commands."""

import sys
from collections.abc import Sequence

from jaxattn.cli.exit_codes import exit_code
from jaxattn.cli.options.parser import VERSION, InputError, OptionParser

PROGRAM = "python -m jaxattn"
COMMANDS = {
    "serve": "completes prompts, chats in the terminal, or serves a model over HTTP",
    "plan": "prints the memory plan of a model on each GPU, without a device",
    "bench": "times kernels, decode steps, whole models and servers; measures perplexity",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the list of commands, and returns the exit code."""
    return exit_code(PROGRAM, lambda: run(argv))


def run(argv: Sequence[str] | None) -> int:
    parser = OptionParser(prog=PROGRAM, description="Prints the commands of this package.")
    parser.add_argument("--version", action="version", version=VERSION)
    _, given = parser.parse_known_args(argv)
    if given:
        known = [word for word in given if word in COMMANDS]
        wanted = f"run {PROGRAM}.{known[0]}" if known else f"run {PROGRAM} without arguments"
        raise InputError(f"{given[0]!r} is no option of the list of commands; {wanted}")
    for name, what in COMMANDS.items():
        print(f"{PROGRAM}.{name:<6} {what}")
    print("Each has --help. The installed scripts are jaxattn-serve, jaxattn-plan, jaxattn-bench.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
