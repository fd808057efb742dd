"""Plots of a run: its rows under their roofline, and times compared with those of baselines.

A run of `model` has bars instead: each step's roofline, its kernels and its time. One of `parallel`
also shows how tokens per second grow with the GPUs (parallel_plot.py).
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from jaxattn.bench.plots import parallel_plot

OURS = "jaxattn"
# A color and a marker for each: ours first, then the baselines in the order of the rows.
COLORS = ("#1f5fa8", "#d9822b", "#3a9a5b", "#b2447d", "#7a68b5", "#888888")
MARKERS = ("o", "D", "s", "^", "v", "P")
POWERS_OF_TWO = [2.0**i for i in range(-4, 14)]
ONE_TWO_FIVE = [digit * 10.0**i for i in range(-4, 4) for digit in (1, 2, 5)]
LINE = 0.042  # height of a label, as a fraction of the plot's
TIMES = {"us": 1e-6, "ms": 1e-3}


class BenchPlotError(Exception):
    """Raised if there is nothing to plot or no way to; the message says what to do."""


def require_matplotlib() -> Any:
    """Returns matplotlib's Figure.

    Raises:
        BenchPlotError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchPlotError(
            "--plot needs matplotlib: install jaxattn[plot], or leave --plot out"
        ) from error
    return Figure


def load(path: Path) -> dict[str, Any]:
    """Loads a run that `--json` stored.

    Raises:
        BenchPlotError: the file cannot be read.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BenchPlotError(f"cannot read {path}: {error}") from error


def unit(row: dict[str, Any]) -> str:
    return next(name for name in TIMES if name in row)


def shape(row: dict[str, Any]) -> dict[str, Any]:
    """The columns before the time."""
    keys = list(row)
    return {key: row[key] for key in keys[: keys.index(unit(row))]}


def name(row: dict[str, Any]) -> str:
    return " ".join(map(str, shape(row).values()))


def times(row: dict[str, Any], peers: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yields (name, time in the row's unit): ours, then each baseline that was measured."""
    yield OURS, row[unit(row)]
    for peer in peers:
        time = row.get(f"{peer} {unit(row)}")
        if isinstance(time, int | float):
            yield peer, time


def save(result: dict[str, Any], path: Path) -> None:
    """Writes a PNG of a run: a roofline, for the delta rule also bars, for whole models only bars.

    Raises:
        BenchPlotError: matplotlib is not installed, the run has nothing to draw, or the file cannot
            be written.
    """
    figure_type = require_matplotlib()
    if result.get("what") == "model":
        _written(_model(figure_type, result), path)
        return
    if result.get("what") == "parallel":
        _written(_parallel(figure_type, result), path)
        return
    rows = [row for row in result.get("rows", []) if "TFLOP/s" in row and "GB/s" in row]
    if not rows:
        raise BenchPlotError(
            "the result has no rows with TFLOP/s and GB/s; plot a result of mla, mla-prefill or gdn"
        )
    peers = list(dict.fromkeys(_peers(rows)))
    tables = [[row for row in rows if unit(row) == each] for each in TIMES]
    bars = [table for table in tables if table] if result.get("what") == "gdn" else []
    height = max(5.0, 0.24 * len(rows))
    below = 0.4 + 0.3 * max(map(len, bars), default=0)
    figure = figure_type(figsize=(9, height + (below if bars else 0)), layout="constrained")
    figure.set_facecolor("white")
    if bars:
        panels = figure.subplot_mosaic(
            [["roof"] * len(bars), list(range(len(bars)))], height_ratios=[height, below]
        )
    else:
        panels = {"roof": figure.subplots()}
    _roofline(panels["roof"], result, rows, peers)
    for place, table in enumerate(bars):
        _bars(panels[place], table, peers)
    figure.legend(
        *panels["roof"].get_legend_handles_labels(), loc="outside lower left", ncols=6,
        frameon=False, fontsize=8,
    )  # fmt: skip
    _written(figure, path)


def _written(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise BenchPlotError(f"cannot write {path}: {error.strerror or error}") from error


def _model(figure_type: Any, result: dict[str, Any]) -> Any:
    """Each decode step's roofline, kernels and time, with the fewest rows at the top."""
    rows = [row for row in result.get("rows", []) if "roof ms" in row]
    if not rows:
        raise BenchPlotError(
            "the result has no decode steps with a roofline; plot a complete result"
        )
    figure = figure_type(figsize=(9, 1.4 + 0.7 * len(rows)), layout="constrained")
    figure.set_facecolor("white")
    axes = figure.subplots()
    shown = {"roof ms": "roof of its bytes", "kernels ms": "kernels", "ms": "step"}
    for place, (column, words) in enumerate(shown.items()):
        bars = axes.barh(
            [at + 0.27 * (place - 1) for at in range(len(rows))],
            [row[column] for row in rows],
            0.25,
            color=COLORS[(5, 1, 0)[place]],
            label=words,
        )
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    names = [f"{row['B']} rows of {row['T']:,}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("ms per decode step")
    axes.set_title(
        f"{result.get('model', '')}, {result.get('device', '')}: roof at "
        f"{result.get('roof_GB_s', 0):,.0f} GB/s",
        loc="left",
        fontsize=9,
    )
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _parallel(figure_type: Any, result: dict[str, Any]) -> Any:
    rows = [{"model": result.get("model", ""), **row} for row in result.get("rows", [])]
    if not rows:
        raise BenchPlotError("the result has no decode steps; plot a complete result")
    title = f"{result.get('device', '')}, {result.get('date', '')[:10]}"
    figure = parallel_plot.draw(figure_type, rows, title)
    if figure is None:
        raise BenchPlotError(
            "the result has neither steps of several GPUs next to one GPU's nor a roofline; plot "
            "a result of `bench parallel` on GPUs"
        )
    return figure


def _peers(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the NAME of each column "NAME us" or "NAME ms", except other times of our own.

    A column "NAME call us" is skipped if there is "NAME us" too.
    """
    for row in rows:
        for key in row:
            who, _, last = key.rpartition(" ")
            if f"{who.removesuffix(' call')} {last}" in row and who.endswith(" call"):
                continue
            if who and last == unit(row) and who not in ("call", "invariant", "weak", "XLA norm"):
                yield who


def _roofline(
    axes: Any, result: dict[str, Any], rows: Sequence[dict[str, Any]], peers: Sequence[str]
) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        intensity = 1e3 * row["TFLOP/s"] / row["GB/s"]  # FLOP/byte
        (_, ours), *_ = every = list(times(row, peers))
        for who, time in every:
            points.setdefault(who, []).append((intensity, row["TFLOP/s"] * ours / time))
    xs, ys = ([p[i] for each in points.values() for p in each] for i in (0, 1))
    left, right, low, high = min(xs) / 1.6, max(xs) * 1.6, min(ys) / 1.4, max(ys) * 1.4
    # Rows are bursts, and so is their roofline; older runs have only that of long loops.
    burst = result.get("burst", result)
    if "copy_GB_s" in burst and "matmul_TFLOP_s" in burst:
        copy = max(burst["copy_GB_s"], burst.get("read_GB_s", 0.0)) / 1e3
        matmul = burst["matmul_TFLOP_s"]
        high = max(high, matmul * 1.4)
        ridge = matmul / copy
        right = max(right, ridge * 1.6)
        axes.plot([left, ridge, right], [left * copy, matmul, matmul], color="black", linewidth=1)
        axes.set_title(
            f"{result.get('device', '')}: memory at {copy * 1e3:,.0f} GB/s, 8192³ products at "
            f"{matmul:,.0f} TFLOP/s",
            loc="left",
            fontsize=9,
        )
    for who, color, marker in zip((OURS, *peers), COLORS, MARKERS, strict=False):
        if who in points:
            face = color if who == OURS else "none"  # does not cover other points
            axes.scatter(
                *zip(*points[who], strict=True), facecolor=face, edgecolor=color, marker=marker,
                label=who, zorder=3, s=26,
            )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, high))
    for axis, steps in ((axes.xaxis, POWERS_OF_TWO), (axes.yaxis, ONE_TWO_FIVE)):
        axis.set_major_locator(FixedLocator(steps))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("FLOP/byte")
    axes.set_ylabel("TFLOP/s")
    axes.grid(color="#e8e8e8", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    _labels(axes, [name(row) for row in rows], points[OURS])
    heads = {" ".join(shape(row)) for row in rows}
    if len(heads) == 1:
        axes.annotate(heads.pop(), (1.04, 1.04), xycoords="axes fraction", fontsize=8)


def _labels(axes: Any, names: Sequence[str], points: Sequence[tuple[float, float]]) -> None:
    """Writes the shapes in a column to the right, each with a line to its point.

    Many points have the same intensity and lie too close for a name next to each.
    """
    order = sorted(range(len(names)), key=lambda i: points[i][1])
    bottom, top = map(math.log, axes.get_ylim())
    heights = [(math.log(points[i][1]) - bottom) / (top - bottom) for i in order]
    for i, at in zip(order, spread(heights, LINE), strict=True):
        axes.annotate(
            names[i],
            points[i],
            xytext=(1.04, at),
            textcoords="axes fraction",
            fontsize=8,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": "#bbbbbb",
                "linewidth": 0.6,
                "relpos": (0, 0.5),  # from the name's left end
                "shrinkB": 3,
            },
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Moves ascending heights as little as possible, so that they are `gap` apart and at most 1."""
    groups: list[list[float]] = []  # each moves as one, to its mean
    for place, height in enumerate(heights):
        groups.append([height - place * gap])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    most = 1 - gap * (len(heights) - 1)
    level = [min(fmean(group), most) for group in groups for _ in group]
    return [at + place * gap for place, at in enumerate(level)]


def _bars(axes: Any, rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> None:
    """Draws the times of each shape, ours and the baselines', with the first shape at the top."""
    shown = dict.fromkeys(who for row in rows for who, _ in times(row, peers))
    thick = 0.8 / len(shown)
    for at, who in enumerate(shown):
        places = [i for i, row in enumerate(rows) if who in dict(times(row, peers))]
        axes.barh(
            [i - 0.4 + (at + 0.5) * thick for i in places],
            [dict(times(rows[i], peers))[who] for i in places],
            thick,
            color=COLORS[(OURS, *peers).index(who) % len(COLORS)],
        )
    axes.set_yticks(range(len(rows)), [name(row) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(unit(rows[0]))
    axes.spines[["top", "right"]].set_visible(False)
