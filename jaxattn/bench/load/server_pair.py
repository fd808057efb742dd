"""The same load test for our server and vLLM's, one after the other, and their comparison."""

import argparse
import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxattn.bench.harness import run_metadata
from jaxattn.bench.harness.engine_options import EngineChoice
from jaxattn.bench.harness.speedup_report import OURS, THEIRS, compared, report
from jaxattn.bench.load import server_process
from jaxattn.bench.load.load_test import LoadTest, OnRow, top_rates
from jaxattn.bench.load.server_process import ServerStartError as ServerStartError

ARRIVALS = {"name": "the wall clock of streams", "version": 1}
COMPARED = (
    "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms", "TPOT p50 ms", "TPOT p99 ms",
    "out tok/s",
)  # fmt: skip


def run(
    args: argparse.Namespace,
    argv: Sequence[str],
    program: str,
    test: LoadTest,
    facts: Mapping[str, Any],
    on_row: OnRow,
) -> int:
    """Measures the engines of `args.choice`; returns 1 if a request failed, else 0.

    The second engine gets the same rates as the first, which are shares of the first engine's top
    rate.

    Raises:
        ServerStartError: a server did not start; the results of an earlier server are stored.
        ServerUnreachable: a server does not answer as it should.
    """
    choice: EngineChoice = args.choice
    test = dataclasses.replace(test, vocab_size=choice.vocab_size, top_first=not test.loads)
    result = run_metadata.begin(
        "serve", program, ["serve", *argv], seed=test.seed, method=ARRIVALS, device=False
    )
    result |= {"model": choice.name, "options": "default", **facts, "engines": {}}
    result |= {"errors": list(choice.messages), "rows": []}
    measured: dict[str, list[dict[str, Any]]] = {OURS: [], THEIRS: []}
    for engine in choice.engines:
        with (
            choice.folder() as folder,
            server_process.started(
                engine,
                folder,
                peer_options=choice.peer_options,
                environment=choice.environment(),
                limit=args.limit,
            ) as (url, start),
        ):
            ran = asyncio.run(test.run(url, None, None, on_row))
        result["engines"][engine] = {"start s": start, **ran}
        measured[engine] = [{"what": "start", "unit": "s", "value": start}, *measures(ran["rows"])]
        result["rows"] = compared(measured[OURS], measured[THEIRS])
        if test.top_first and not test.loads:
            test = dataclasses.replace(test, loads=tuple(top_rates(ran["rows"][0], test.shares)))
        run_metadata.end(result, args.json)
    title, both = f"{choice.name}, default options", len(choice.engines) > 1
    report(title, result["rows"], result["errors"], both=both)
    loads = [row for ran in result["engines"].values() for row in ran["rows"]]
    return int(any(row["failed"] for row in loads))


def measures(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The values of a load test's rows that are compared, one per row of the result."""
    return [
        {
            "what": f"{row['load']}, {column.rpartition(' ')[0]}",
            "unit": column.rpartition(" ")[2],
            "value": row[column],
        }
        for row in rows
        for column in COMPARED
        if not math.isnan(row.get(column, math.nan))
    ]
