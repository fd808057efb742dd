"""`python -m jaxattn.serve`; the command is jaxattn/cli/serve/command.py."""

from jaxattn.cli.serve.command import main

if __name__ == "__main__":
    raise SystemExit(main())
