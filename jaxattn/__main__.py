"""`python -m jaxattn COMMAND`, which runs a command; without arguments, it lists the commands."""

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
    """Runs the command that the first argument names, or lists all; returns the exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given and given[0] in COMMANDS:
        return run(*given)
    return exit_code(PROGRAM, lambda: show_commands(given))


def run(command: str, *arguments: str) -> int:
    """Runs a command as its own module does; the import of each takes seconds."""
    if command == "serve":
        from jaxattn.cli.serve.command import main as serve

        return serve(arguments)
    if command == "plan":
        from jaxattn.cli.plan import main as plan

        return plan(arguments)
    from jaxattn.bench.__main__ import main as bench

    return bench([*arguments])


def show_commands(arguments: Sequence[str]) -> int:
    parser = OptionParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [-h] [--version] [{{{','.join(COMMANDS)}}} ...]",
        description="Runs a command of this package, or prints the list of commands.",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    _, unknown = parser.parse_known_args(arguments)
    if unknown:
        *others, last = COMMANDS
        raise InputError(
            f"{unknown[0]!r} is not a command; the first argument must be {', '.join(others)} or "
            f"{last}"
        )
    for name, description in COMMANDS.items():
        print(f"{PROGRAM}.{name:<6} {description}")
    print(
        "Each command has --help. The installed scripts are jaxattn-serve, jaxattn-plan, "
        "jaxattn-bench."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
