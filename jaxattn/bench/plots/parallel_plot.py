"""The plot of a run of `parallel`: tokens per second by the number of GPUs, and step times.

The left panel shows a line for each model, mode and number of rows: tokens per second relative to
one GPU. The right panel shows a step's roofline, kernels and time if no single GPU holds the model
or if there is only one layout.
"""

from collections.abc import Iterable
from typing import Any

COLORS = ("#1f5fa8", "#d9822b", "#3a9a5b", "#b2447d", "#7a68b5", "#888888", "#b59f2b", "#2bb5a4")
SHOWN = {"roof ms": ("roof of its bytes", 5), "kernels ms": ("kernels", 1), "ms": ("step", 0)}

type Row = dict[str, Any]
type Line = list[tuple[int, float]]  # GPUs, times one GPU


def mode(layout: str) -> str:
    """The mode of flags such as "--data 2 --expert 2": DP + EP."""
    words = layout.split()
    given = {name.removeprefix("--"): n for name, n in zip(words[::2], words[1::2], strict=True)}
    if "data" in given:
        return "DP + EP" if "expert" in given else "DP"
    return "CP" if "context" in given else "TP" if given else "one GPU"


def lines(rows: Iterable[Row]) -> dict[str, Line]:
    """Maps a line's label to (GPUs, tokens per second relative to one GPU).

    A line takes the faster of the steps with and without one launch per sum. If one GPU has no room
    for the rows of all data groups, the comparison is with one GPU at the rows of one group.
    """
    one: dict[Any, float] = {}
    found: dict[str, dict[int, float]] = {}
    rows = list(rows)
    for row in rows:
        if row["GPUs"] == 1:
            one[row["model"], row["B"], row["T"]] = row["tokens/s"]
    for row in rows:
        if row["GPUs"] == 1:
            continue
        kind, count, words = mode(row["layout"]), row["B"], "rows"
        if (row["model"], count, row["T"]) not in one and kind.startswith("DP"):
            count, words = count // row["GPUs"], "rows per GPU"
        alone = one.get((row["model"], count, row["T"]))
        if alone is not None:
            name = f"{row['model']}, {kind}, {count} {words} of {row['T']:,}"
            line = found.setdefault(name.replace(" 1 rows", " 1 row"), {1: 1.0})
            line[row["GPUs"]] = max(line.get(row["GPUs"], 0.0), row["tokens/s"] / alone)
    return {words: sorted(line.items()) for words, line in found.items()}


def draw(figure_type: Any, rows: list[Row], title: str) -> Any:
    """The figure of rows that each name their `model`; None if both panels would be empty."""
    held = {row["model"] for row in rows if row["GPUs"] == 1}
    fastest: dict[Any, Row] = {}
    for row in sorted(rows, key=lambda row: -row["ms"]):
        if row["model"] not in held and row["roof ms"]:
            fastest[row["model"], row["layout"], row["T"], row["B"]] = row
    large = [fastest[key] for key in sorted(fastest)]
    both = lines(rows)
    panels = bool(both) + bool(large)
    if not panels:
        return None
    height = max(5.0 if both else 2.0, 1.4 + 0.6 * len(large))
    figure = figure_type(figsize=(6.5 * panels, height), layout="constrained")
    figure.set_facecolor("white")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    if both:
        _scaling(axes.pop(0), both)
    if large:
        _steps(axes.pop(0), large)
    figure.suptitle(title, x=0.01, ha="left", fontsize=9)
    return figure


def _scaling(axes: Any, both: dict[str, Line]) -> None:
    counts = sorted({gpus for line in both.values() for gpus, _ in line})
    axes.plot(counts, counts, color="black", linewidth=1, linestyle="--", label="as many as GPUs")
    for number, (words, line) in enumerate(both.items()):
        color = COLORS[number % len(COLORS)]
        style = "-" if number < len(COLORS) else ":"
        axes.plot(
            *zip(*line, strict=True), color=color, linestyle=style, marker="o", markersize=4,
            label=words,
        )  # fmt: skip
        axes.annotate(
            f"{line[-1][1]:.2f}", line[-1], (5, 0), textcoords="offset points", fontsize=8,
            va="center", color=color,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    highest = max(times for line in both.values() for _, times in line)
    ticks = [1, 1.5, 2, 3, *(2**n for n in range(2, 6) if 2**n <= 2 * highest)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens per second, times one GPU")
    axes.grid(color="#e8e8e8", linewidth=0.6)
    axes.legend(frameon=False, fontsize=7, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)


def _steps(axes: Any, rows: list[Row]) -> None:
    for place, (column, (words, color)) in enumerate(SHOWN.items()):
        bars = axes.barh(
            [at + 0.27 * (place - 1) for at in range(len(rows))],
            [row[column] for row in rows],
            0.25,
            color=COLORS[color],
            label=words,
        )
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=7)
    names = [
        f"{row['model']}\n{row['layout'].replace('--', '')}: {row['B']} x {row['T']:,}"
        for row in rows
    ]
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("ms per decode step")
    axes.legend(frameon=False, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
