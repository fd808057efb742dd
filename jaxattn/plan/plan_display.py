"""A plan as a table, as a bar in the terminal, and as a picture."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxattn.memory.plan import GIB, MIB, MemoryPlan
from jaxattn.plan.alternative_scratch_designs import ScratchComparison

COLORS = ("blue", "yellow", "green", "magenta", "cyan", "red", "bright_blue", "bright_magenta")
# The colors of the items in the picture. In black and white their order distinguishes them.
PLOT_COLORS = (
    "#4477aa",
    "#ccbb44",
    "#228833",
    "#aa3377",
    "#66ccee",
    "#ee6677",
    "#222255",
    "#663333",
)
FREE = "bright_black"
NARROW = 80  # in fewer columns a table would cut its numbers


class PlanPlotError(RuntimeError):
    """The picture cannot be drawn or written."""


def print_plan(console: Console, plan: MemoryPlan, naive: Sequence[ScratchComparison] = ()) -> None:
    """Prints the table, the bar, the facts, the assumptions, and the scratch of other designs.

    On a narrow terminal it prints lists instead of tables, so that no number is cut.
    """
    narrow = console.width < NARROW
    if narrow:
        console.print(_list(plan))
    else:
        console.print(_table(plan))
    console.print(bar(plan, min(console.width, 100), "\n" if narrow else "  "))
    for name, value in plan.facts:
        console.print(f"{name}: {value}" if narrow else f"{name:<22} {value}")
    for choice in plan.choices:
        console.print(f"chosen: {choice}")
    for note in plan.notes:
        console.print(f"- {note}", style="dim")
    if naive:
        console.print(_comparison_list(naive) if narrow else _comparison(naive))


def _list(plan: MemoryPlan) -> Text:
    """Returns the table's rows as a list; the longest number takes 19 columns."""
    text = Text()
    text.append(f"{plan.title}\n", style="bold")
    for item in plan.items:
        text.append(f"{item.name}\n  {item.nbytes:,} B\n  ({item.basis}: {item.why})\n")
        for part in item.parts:
            text.append(f"  {part.name}\n  {part.nbytes:,} B\n", style="dim")
    for name, nbytes, why, style in _sums(plan):
        text.append(f"{name}\n  {nbytes:,} B\n" + (f"  ({why})\n" if why else ""), style=style)
    text.rstrip()
    return text


def _sums(plan: MemoryPlan) -> list[tuple[str, int, str, str]]:
    """Returns the totals of the plan as (name, bytes, why, style)."""
    found = [("total", plan.total, "", "")]
    if plan.budget is not None and plan.reserve is not None:
        allowed, short = plan.budget.arrays(plan.outside), plan.reserve < 0
        found += [
            ("in JAX's allocator", plan.inside, "", ""),
            ("allowed in JAX's allocator", allowed, plan.budget.reason(plan.outside), ""),
            ("missing" if short else "reserve", abs(plan.reserve), "", "bold red" if short else ""),
        ]
    return found


def _table(plan: MemoryPlan) -> Table:
    table = Table(title=plan.title, title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("MiB", justify="right", no_wrap=True)
    table.add_column("known from", no_wrap=True)
    table.add_column("why", overflow="fold")
    for item in plan.items:
        table.add_row(item.name, f"{item.nbytes:,}", _mib(item.nbytes), item.basis, Text(item.why))
        for part in item.parts:
            table.add_row(
                f"  {part.name}",
                f"{part.nbytes:,}",
                _mib(part.nbytes),
                "",
                Text(part.why),
                style="dim",
            )
    table.add_section()
    for name, nbytes, why, style in _sums(plan):
        table.add_row(name, f"{nbytes:,}", _mib(nbytes), "", Text(why), style=style)
    return table


def _comparison(naive: Sequence[ScratchComparison]) -> Table:
    table = Table(title="scratch memory of other designs", title_justify="left")
    for name in ("case", "naive GiB", "naive bytes", "here GiB", "comparison"):
        table.add_column(name, justify="right" if "i" in name[-3:] or "bytes" in name else "left")
    for each in naive:
        table.add_row(
            each.name,
            f"{each.nbytes / GIB:.3f}",
            f"{each.nbytes:,}",
            f"{each.arena_bytes / GIB:.3f}",
            each.why,
        )
    return table


def _comparison_list(naive: Sequence[ScratchComparison]) -> Text:
    lines = ["scratch memory of other designs"]
    for each in naive:
        lines += [
            each.name,
            "  naive",
            f"  {each.nbytes:,} B",
            "  here",
            f"  {each.arena_bytes:,} B",
        ]
        lines.append(f"  ({each.why})")
    return Text("\n".join(lines))


def segments(plan: MemoryPlan) -> list[tuple[str, int]]:
    """Returns (name, bytes) of the device from left to right; the last is the free memory."""
    found = [(item.name, item.nbytes) for item in plan.items if item.nbytes]
    if plan.budget is not None:
        found.append(("free", max(plan.budget.total - plan.total, 0)))
    return found


def bar(plan: MemoryPlan, width: int, between: str = "  ") -> Text:
    """Returns one line of blocks, a color per item, and a legend with `between` as separator."""
    parts = segments(plan)
    whole = sum(size for _, size in parts) or 1
    text, legend, done, drawn = Text(), Text(), 0, 0
    for place, (name, size) in enumerate(parts):
        done += size
        end = round(done / whole * width)
        color = FREE if name == "free" else COLORS[place % len(COLORS)]
        block = "\u2591" if name == "free" else "\u2588"
        text.append(block * (end - drawn), style=color)
        drawn = end
        if size / whole >= 0.001:
            legend.append(f"{block} ", style=color)
            legend.append(f"{name} {size / whole:.1%}{between}")
    return Text("\n").join([text, legend])


def save_plot(plan: MemoryPlan, path: Path) -> None:
    """Saves the stacked bar as a PNG.

    Raises:
        PlanPlotError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanPlotError(
            "--plot needs matplotlib: install jaxattn[plot], or leave --plot out"
        ) from error
    figure = Figure(figsize=(11, 2.6), layout="constrained")
    axes = figure.subplots()
    left = 0.0
    for place, (name, size) in enumerate(segments(plan)):
        color = "#dddddd" if name == "free" else PLOT_COLORS[place % len(PLOT_COLORS)]
        axes.barh(
            0,
            size / GIB,
            left=left,
            color=color,
            edgecolor="white",
            linewidth=0.5,
            label=f"{name}: {size / GIB:,.2f} GiB",
        )
        left += size / GIB
    if plan.budget is not None:
        limit = (plan.budget.arrays(plan.outside) + plan.outside) / GIB
        axes.axvline(limit, color="black", linewidth=1, linestyle="--")
    axes.set_title(plan.title, loc="left", fontsize=10)
    axes.set_xlabel("GiB")
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise PlanPlotError(f"cannot write {path}: {error.strerror or error}") from error


def _mib(size: int) -> str:
    return f"{size / MIB:,.2f}"
