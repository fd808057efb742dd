"""`python -m jaxattn.serve`; the command is jaxattn/cli/serve.py."""

from jaxattn.cli.serve import main

if __name__ == "__main__":
    raise SystemExit(main())
