"""`python -m jaxattn.plan`; the command is jaxattn/cli/plan.py."""

from jaxattn.cli.plan import main

if __name__ == "__main__":
    raise SystemExit(main())
