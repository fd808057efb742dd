"""The tables of docs/whole-models.md: decode steps and prompts of public models on one GPU."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.performance.cells import Cell, Row, Table, number, rows_of, table_of, text
from scripts.performance.several_gpus import fastest

CONFIGS = Path(__file__).parents[2] / "jaxattn" / "models" / "catalog" / "known"


def decode_steps() -> str:
    """The fastest stored run of each model and number of rows on one H200, at 4,096 tokens."""
    columns: dict[str, Cell] = {
        "model": text("model"),
        "B": text("B"),
        "ms": number("ms", 2),
        "roof ms": number("roof ms", 2),
        "times roof": lambda row: f"{row['ms'] / row['roof ms']:.2f}",
        "us per layer above the roof": lambda row: (
            f"{(row['ms'] - row['roof ms']) / layers(row['model']) * 1000:.1f}"
        ),
    }
    runs = sorted(fastest(_on_one_gpu()), key=lambda row: (row["model"], row["B"]))
    return table_of(columns, runs)


def _on_one_gpu() -> Iterator[Row]:
    one = {"GPUs": 1, "layout": "", "T": 4096}
    for run in ("model-*", "parallel-4-h200", "kimi-linear-48b-one-h200"):
        for row in rows_of(run):
            if row.get("step", "decode") == "decode" and one.items() <= (one | row).items():
                yield one | row


def layers(model: str) -> int:
    """The number of layers in a model's published configuration."""
    return int(json.loads((CONFIGS / f"{model}.json").read_text())["num_hidden_layers"])


WHOLE_MODELS: dict[str, Callable[[], str]] = {
    "decode-steps": decode_steps,
    "prompts": Table(
        run="model-*",
        where=lambda row: row["step"] == "prefill",
        columns={
            "model": text("model"),
            "ms": number("ms", 2),
            "kernels ms": number("kernels ms", 2),
            "TFLOP/s": number("TFLOP/s", 0),
        },
    ),
    "model-h100": Table(
        run="h100-*",
        columns={
            "model": text("model"),
            "B": text("B"),
            "ms": number("ms", 2),
            "roof ms": number("roof ms", 2),
            "times roof": number("times roof", 2),
            "us per layer above the roof": number("us a layer over roof"),
        },
    ),
    "step": Table(
        run="step",
        columns={
            "16 layers, B 64": text("model"),
            "T": text("T"),
            "us per layer": number("us a layer"),
            "profiled us": number("profiled us"),
            "MLA/GDN kernels": number("kernels us"),
            "norms, appends": number("small kernels us"),
            "matmuls": number("matmuls us"),
            "the rest": text("over kernels + matmuls"),
        },
    ),
}
