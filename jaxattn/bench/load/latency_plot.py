"""A plot of a load test: time to first token and time between tokens, over throughput."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxattn.bench.load.metrics import PERCENTILES
from jaxattn.bench.plots.result_plot import COLORS, require_matplotlib


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Writes the plot to `path`.

    Raises:
        BenchPlotError: matplotlib is not installed.
    """
    figure = require_matplotlib()(figsize=(10, 4.2), layout="constrained")
    figure.suptitle(title)
    for place, name in enumerate(("TTFT", "ITL"), 1):
        axes = figure.add_subplot(1, 2, place)
        for percent, color in zip(PERCENTILES, COLORS, strict=False):
            points = [row for row in rows if row["ok"]]
            across = [row["out tok/s"] for row in points]
            up = [row[f"{name} p{percent} ms"] for row in points]
            axes.plot(across, up, marker="o", color=color, label=f"p{percent}")
        for row in (row for row in rows if row["ok"]):
            axes.annotate(row["load"], (row["out tok/s"], row[f"{name} p99 ms"]), fontsize=7)
        axes.set(xlabel="output tokens per second", ylabel=f"{name} in ms", ylim=(0, None))
        axes.grid(color="#e8e8e8", linewidth=0.6)
        axes.legend()
    figure.savefig(path, dpi=150)
