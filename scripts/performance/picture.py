"""The README's plot: MLA decode compared with two other libraries, from stored runs."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.performance.cells import rows_of


class Mark(NamedTuple):
    """A series of points: our times compared with one library's, measured in one way."""

    label: str
    run: str
    ours: str
    theirs: str
    color: str
    marker: str


MARKS = (
    Mark("FlashMLA, burst", "mla-flashmla", "us", "flashmla us", "#1f5fa8", "o"),
    Mark("FlashMLA, long loop", "mla-flashmla", "call us", "flashmla call us", "#1f5fa8", "D"),
    Mark("FlashInfer, long loop", "mla", "call us", "flashinfer call us", "#d9822b", "s"),
)


def described(shape: str) -> str:
    """A shape such as "128,16,4096,1" in words."""
    rows, heads, tokens, new = shape.split(",")
    several = "" if new == "1" else f", {new} new each"
    return f"{rows} x {int(tokens):,} tokens, {heads} heads{several}"


def points(mark: Mark, shapes: Sequence[str]) -> list[tuple[int, float]]:
    """(index of the shape, speedup of jaxattn) for each shape in the run."""
    return [
        (shapes.index(row["B,H,T,S"]), row[mark.theirs] / row[mark.ours])
        for row in rows_of(mark.run)
        if row["B,H,T,S"] in shapes and "cache" not in row and row[mark.theirs]
    ]


def digest() -> str:
    """A hash of the plotted data, which changes with any of its points."""
    shapes = [row["B,H,T,S"] for row in rows_of("mla-flashmla")]
    shown = [(mark.label, points(mark, shapes)) for mark in MARKS]
    return hashlib.sha256(repr((shapes, shown)).encode()).hexdigest()


def draw(path: Path) -> None:
    """Draws the shapes in both runs as an SVG, with the largest batch at the top."""
    import matplotlib
    from matplotlib.figure import Figure

    # The same data give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "jaxattn", "svg.fonttype": "none"})
    shapes = [row["B,H,T,S"] for row in rows_of("mla-flashmla")]
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    figure.set_facecolor("white")
    axes = figure.subplots()
    for mark in MARKS:
        places, values = zip(*points(mark, shapes), strict=True)
        axes.scatter(
            values, places, label=mark.label, marker=mark.marker, s=38, zorder=3,
            edgecolor=mark.color, facecolor=mark.color if mark.marker == "o" else "none",
        )  # fmt: skip
    _finish(axes, shapes)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Identifier": digest()})


def _finish(axes: Any, shapes: list[str]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(0.85, 2.05)
    axes.xaxis.set_major_locator(FixedLocator([0.9, 1, 1.1, 1.2, 1.4, 1.6, 1.8, 2]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_yticks(range(len(shapes)), [described(shape) for shape in shapes], fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("left of 1 the other library is faster, right of 1 jaxattn is; times as fast")
    axes.set_title(
        "MLA decode on one H200, bfloat16: rows x tokens in the cache", loc="left", fontsize=10
    )
