"""The README's examples run as they are printed, without a warning, and its times are those that
the stored runs of the bench have.
"""

import itertools
import json
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
RESULTS = README.parent / "benchmarks" / "results"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)

# How a table begins: the run, or runs, that it shows, and their name of each column of figures,
# None where the figures are of no run of ours. The other columns are labels.
SAME = {name: name for name in ("us", "call us", "ms", "weak ms", "call ms", "TFLOP/s", "GB/s")}
DECODE = SAME | {"FlashInfer, call us": "flashinfer call us", "FlashMLA us": None}
PEERS = SAME | {
    "FLA 0.6.0, call us": "fla call us",
    "FlashQLA 0.1.3, call us": "flashqla call us",
}
NORM = SAME | {"with XLA's norm, ms": "XLA norm ms"}
PREFILL = SAME | {"jax's at 128": "jax's, 128, TFLOP/s", "at 256": "jax's, 256, TFLOP/s"}
STEP = {
    "us a layer": "us a layer",
    "profiled": "profiled us",
    "MLA/GDN kernels": "kernels us",
    "norms, appends": "small kernels us",
    "matmuls": "matmuls us",
    "the rest": "over kernels + matmuls",
}
MODEL = SAME | {name: name for name in ("kernels ms", "roof ms", "times roof")}
TABLES = {
    "| `python -m jaxattn.bench mla --all --no-xla`": ("mla", DECODE),
    "| B, H, T, S | cache |": ("mla", SAME),
    "| `python -m jaxattn.bench gdn --all --no-peers --no-xla`": ("gdn", SAME),
    "| The same run: Hk/Hv": ("gdn", SAME),
    "| The same run, the last rows: Hk/Hv": ("gdn", NORM),
    "| `python -m jaxattn.bench gdn --no-xla --only`": ("gdn-peers", PEERS),
    "| `python -m jaxattn.bench step`": ("step", STEP),
    "| `python -m jaxattn.bench mla-prefill`": ("mla-prefill", PREFILL),
    "| `python -m jaxattn.bench model`": ("model-*", MODEL),
}
LABELS = (
    "B,H,T,S",
    "B,T,H,prefix",
    "cache",
    "B,Hk,Hv,S",
    "state",
    "Hk/Hv",
    "sequences",
    "output",
    "model",
    "T",
)


def test_one_example_uses_a_kernel_one_a_module_and_one_the_engine():
    assert any("mla_decode(" in text or "mla_decode," in text for text in EXAMPLES)
    assert any("MultiHeadLatentAttention" in text for text in EXAMPLES)
    assert any("engine.generate(" in text for text in EXAMPLES)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_it_runs(number, capsys):
    code = compile(EXAMPLES[number], f"README.md, example {number + 1}", "exec")
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out


def table(start):
    """Rows of the table that begins so, as {column: cell}."""
    lines = README.read_text().splitlines()
    (first,) = [number for number, line in enumerate(lines) if line.startswith(start)]
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    names, _, *cells = [[cell.strip() for cell in row[1:-1].split("|")] for row in rows]
    return [dict(zip(names, row, strict=True)) for row in cells]


def label(parts):
    return ":".join(map(str, parts)).replace(" to ", "-").replace(", ", ",").replace("/", ",")


def figure(row, name):
    """What the run has; "" if nothing. A table in us may show a run in ms."""
    in_ms = re.sub("us$", "ms", name)
    return row[in_ms] * 1000 if name not in row and in_ms in row else row.get(name, "")


def rows_of(path):
    """The rows of a run; those of a whole model say which."""
    run = json.loads(path.read_text())
    return [{"model": run["model"], **row} if "model" in run else row for row in run["rows"]]


def labels(row):
    return ("model", "step", "B") if "step" in row else LABELS


@pytest.mark.parametrize("start", TABLES)
def test_a_table_shows_the_figures_of_the_stored_run(start):
    run, columns = TABLES[start]
    stored = {
        label(row[name] for name in labels(row) if name in row): row
        for path in RESULTS.glob(f"{run}.json")
        for row in rows_of(path)
    }
    shown = table(start)
    assert len(shown) >= 4
    for cells in shown:
        row = stored[label(cell for name, cell in cells.items() if name not in columns)]
        for name, cell in cells.items():
            if columns.get(name) is None:
                continue
            value = figure(row, columns[name])
            decimals = len(cell.partition(".")[2])
            right = value if isinstance(value, str) else f"{value:.{decimals}f}"
            assert cell == right, f"{start} {cells}: {name} is {value} in {run}.json"
