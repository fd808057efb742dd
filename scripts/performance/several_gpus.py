"""The tables of docs/several-gpus.md: decode steps by layout, one long row, and all-reduces.

A configuration that was timed several times is shown by its fastest run.
"""

import dataclasses
from collections.abc import Callable, Iterable

from scripts.performance.cells import Row, markdown, rows_of

ONE_GPU_TOO = ("DeepSeek-V2-Lite", "Qwen3.5-35B-A3B")
FOUR_GPUS_ONLY = ("Qwen3.5-397B-A17B-FP8", "Qwen3-Next-80B-A3B")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutTable:
    """Decode steps of some models: a line for each layout, number of rows and length.

    Attributes:
        run: the name of its file without ".json"; may have a `*`.
        models: those that are shown, in this order; empty shows all of them.
        where: the runs that are shown.
    """

    run: str
    models: tuple[str, ...] = ()
    where: Callable[[Row], bool] = lambda row: True

    def __call__(self) -> str:
        runs = fastest(rows_of(self.run))
        one = {_work(row): row["tokens/s"] for row in runs if row["GPUs"] == 1}
        shown = [row for row in runs if self.where(row) and self._model(row) < len(self._models)]
        shown.sort(key=lambda row: (self._model(row), row["T"], row["B"], row["GPUs"], row["ms"]))
        titles = ["model", "layout", "rows", "tokens per row", "ms", "roof ms", "tokens per second"]
        cells = [
            [
                row["model"],
                f"`{row['layout']}`" if row["layout"] else "one GPU",
                f"{row['B']:,}",
                f"{row['T']:,}",
                f"{row['ms']:.2f}",
                f"{row['roof ms']:.2f}",
                f"{row['tokens/s']:,.0f}",
            ]
            for row in shown
        ]
        if any(_work(row) in one for row in shown):
            titles.append("times one GPU")
            for line, row in zip(cells, shown, strict=True):
                base = one.get(_work(row))
                compared = base is not None and row["GPUs"] > 1
                line.append(f"{row['tokens/s'] / base:.2f}" if compared and base else "")
        if all("cache tokens" in row for row in shown):
            titles.append("cache tokens in all")
            for line, row in zip(cells, shown, strict=True):
                line.append(f"{row['cache tokens']:,}")
        return markdown(titles, cells)

    @property
    def _models(self) -> tuple[str, ...]:
        return self.models or tuple(sorted({row["model"] for row in rows_of(self.run)}))

    def _model(self, row: Row) -> int:
        models = self._models
        return models.index(row["model"]) if row["model"] in models else len(models)


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


def long_row() -> str:
    """One row of 1,000,000 tokens: attention of one layer over one, two and four GPUs."""
    titles = ["heads", "GPUs", "us", "only `mla_decode`, us", "times one GPU", "per doubling"]
    cells = [
        [
            str(row["H"]),
            str(row["GPUs"]),
            f"{row['us']:.0f}",
            f"{row['attention us']:.0f}",
            f"{row['times one GPU']:.2f}" if "times one GPU" in row else "",
            f"{row['efficiency']:.0%}" if "efficiency" in row else "",
        ]
        for row in rows_of("long-row-h200-*-heads")
    ]
    return markdown(titles, cells)


def all_reduces() -> str:
    """Kernel times of one sum in bfloat16: the fused op and XLA's own kernel."""
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
    "long-row": long_row,
    "all-reduces": all_reduces,
}
