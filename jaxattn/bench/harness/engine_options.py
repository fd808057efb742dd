"""Command-line options of benches that run whole engines: the model, and the engines to run."""

import argparse
import contextlib
import dataclasses
import importlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxattn.bench.harness.result_tables import check_files
from jaxattn.bench.harness.speedup_report import OURS, THEIRS
from jaxattn.bench.model.config_folder import SMALL, write_folder
from jaxattn.bench.model.model_lookup import UnknownModelError, find

BASELINES = "jaxattn.bench.baselines"  # exists only in a checkout


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """A model that is given only by its config.json, and the engines that run it.

    Attributes:
        name: The model's name, which is also the name of its folder.
        fields: The fields of config.json.
        engines: The engines in the order in which they run, vLLM first.
        peer_options: Additional options of vLLM.
        messages: Messages about engines that do not run, with the reason.
        on_cpu: Whether the engines run on the CPU.
    """

    name: str
    fields: Mapping[str, Any]
    engines: tuple[str, ...]
    peer_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    messages: tuple[str, ...] = ()
    on_cpu: bool = False

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A temporary folder with the model's config.json, for an engine to load."""
        with tempfile.TemporaryDirectory() as parent:
            path = Path(parent, self.name)
            path.mkdir()
            write_folder(path, dict(self.fields))
            yield path

    def environment(self) -> dict[str, str]:
        """Environment variables for the process of an engine."""
        return {"JAX_PLATFORMS": "cpu"} if self.on_cpu else {}

    @property
    def vocab_size(self) -> int:
        return int(self.fields.get("text_config", self.fields)["vocab_size"])


def add_engines(parser: argparse.ArgumentParser, *, model: str = "MODEL") -> None:
    """Adds the options that `chosen` reads."""
    parser.add_argument("target", nargs="?", metavar=model, help="what to run; see above")
    parser.add_argument(
        "--engine",
        choices=(OURS, THEIRS.lower(), "both"),
        help="engines to run (default: both if vLLM is installed)",
    )
    parser.add_argument(
        "--small", action="store_true", help="use a model of one layer on a CPU, to try the bench"
    )
    parser.add_argument(
        "--peer-options",
        type=json.loads,
        default={},
        metavar="JSON",
        help="further arguments for vLLM as a JSON object, if the machine needs them",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="maximum time of an engine's run or of its server's start",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the whole result to this file"
    )


def chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> EngineChoice:
    """Returns the model and the engines; exits with a message if the options do not fit."""
    if bool(args.target) == args.small:
        parser.error("give a MODEL, or --small, which has its own model")
    if not isinstance(args.peer_options, dict):
        parser.error(f"--peer-options must be a JSON object; got {args.peer_options!r}")
    check_files(parser, args)
    name, fields = "small", SMALL
    if args.target:
        try:
            name, fields, _ = find(args.target)
        except UnknownModelError as error:
            parser.error(str(error))
    absent = peer_missing()
    if args.engine in (THEIRS.lower(), "both") and absent:
        parser.error(f"--engine {args.engine}: {absent}")
    engines = {OURS: (OURS,), THEIRS.lower(): (THEIRS,), "both": (THEIRS, OURS)}
    engine = args.engine or (OURS if absent else "both")
    messages = (f"Only {OURS} runs: {absent}",) if absent and args.engine is None else ()
    return EngineChoice(
        name=name,
        fields=fields,
        engines=engines[engine],
        peer_options=args.peer_options,
        messages=messages,
        on_cpu=args.small,
    )


def peer_missing() -> str | None:
    """The reason why vLLM cannot be measured too; None if it can."""
    try:
        adapter = importlib.import_module(f"{BASELINES}.vllm_engine")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(BASELINES):
            raise
        return (
            "other engines need a checkout of the repository, but this package is not part of one"
        )
    said: str | None = adapter.missing()
    return said
