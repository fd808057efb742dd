"""The tables of docs/several-gpus.md: decode steps by layout, one long row, and all-reduces.

If a configuration was timed several times, the tables show its fastest run.
"""

import dataclasses
from collections.abc import Callable, Iterable

from scripts.performance.cells import (
    Row,
    Table,
    count,
    markdown,
    number,
    percent,
    rows_of,
    table_of,
    text,
)

ONE_GPU_TOO = ("DeepSeek-V2-Lite", "Qwen3.5-35B-A3B")
FOUR_GPUS_ONLY = ("Qwen3.5-397B-A17B-FP8", "Qwen3-Next-80B-A3B")


LAYOUT = {
    "model": text("model"),
    "layout": lambda row: f"`{row['layout']}`" if row["layout"] else "one GPU",
    "rows": count("B"),
    "tokens per row": count("T"),
    "ms": number("ms", 2),
    "roof ms": number("roof ms", 2),
    "tokens per second": count("tokens/s"),
    "times one GPU": number("times one GPU", 2),
    "cache tokens in all": count("cache tokens"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutTable:
    """Decode steps of several models: a line for each layout, number of rows and length.

    Attributes:
        run: The name of the run's file without ".json"; may contain a `*`.
        models: The models to show, in this order; empty shows all of them.
        where: Selects the rows to show.
    """

    run: str
    models: tuple[str, ...] = ()
    where: Callable[[Row], bool] = lambda row: True

    def __call__(self) -> str:
        runs = fastest(rows_of(self.run))
        one = {_work(row): row["tokens/s"] for row in runs if row["GPUs"] == 1}
        models = self.models or tuple(sorted({row["model"] for row in runs}))
        shown = [row for row in runs if row["model"] in models and self.where(row)]
        shown.sort(
            key=lambda row: (models.index(row["model"]), row["T"], row["B"], row["GPUs"], row["ms"])
        )
        for row in shown:
            if row["GPUs"] > 1 and _work(row) in one:
                row["times one GPU"] = row["tokens/s"] / one[_work(row)]
        return table_of(LAYOUT, shown)


def fastest(rows: Iterable[Row]) -> list[Row]:
    """The fastest run of each model, layout, number of rows and length."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        key = (*_work(row), row["GPUs"], row["layout"])
        if key not in found or row["ms"] < found[key]["ms"]:
            found[key] = row
    return list(found.values())


def _work(row: Row) -> tuple[object, ...]:
    return row["model"], row["B"], row["T"]


def all_reduces() -> str:
    """Kernel times of one bfloat16 all-reduce: the fused op and XLA's own kernel."""
    times: dict[int, dict[tuple[int, str], float]] = {}
    for row in rows_of("collectives-h200"):
        if row["dtype"] == "bfloat16":
            times.setdefault(row["KiB"], {})[row["GPUs"], row["sum"]] = row["kernel us"]
    columns = {
        "two GPUs, fused, us": (2, "one launch"),
        "two GPUs, XLA, us": (2, "XLA"),
        "four GPUs, fused, us": (4, "one launch"),
        "four GPUs, XLA, us": (4, "XLA"),
    }
    cells = [
        [f"{kib:,}", *(f"{of[key]:.1f}" if key in of else "" for key in columns.values())]
        for kib, of in sorted(times.items())
    ]
    return markdown(["KiB", *columns], cells)


SEVERAL_GPUS: dict[str, Callable[[], str]] = {
    "parallel": LayoutTable(run="parallel-4-h200", models=ONE_GPU_TOO),
    "parallel-two": LayoutTable(
        run="parallel-h200-*",
        where=lambda row: (
            row["GPUs"] == 2
            and row["T"] < 1_000_000
            and (row["model"] not in ONE_GPU_TOO or row["B"] * row["T"] == 128 * 32768)
        ),
    ),
    "parallel-four": LayoutTable(run="parallel-4-h200", models=FOUR_GPUS_ONLY),
    # Attention of one layer for one row of 1,000,000 tokens.
    "long-row": Table(
        run="long-row-h200-*-heads",
        columns={
            "heads": text("H"),
            "GPUs": text("GPUs"),
            "us": number("us", 0),
            "only `mla_decode`, us": number("attention us", 0),
            "times one GPU": number("times one GPU", 2),
            "per doubling": percent("efficiency"),
        },
    ),
    "all-reduces": all_reduces,
}
