"""`python -m jaxattn.serve`. The command is implemented in jaxattn/cli/serve/command.py."""

from jaxattn.cli.serve.command import main

if __name__ == "__main__":
    raise SystemExit(main())
