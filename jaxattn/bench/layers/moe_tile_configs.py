"""`python -m jaxattn.bench moe-cuts`: the MoE kernels with several tile configurations.

A row is a model, a number of tokens and the change to the configuration that `choose` returns.
Times are those of `jaxattn.bench.layers.moe`. They are the basis of
`jaxattn.kernels.moe.tile_config`.
"""

import dataclasses
from typing import Any

from jaxattn.bench.harness.timing import kernel_seconds
from jaxattn.bench.layers import moe
from jaxattn.core.dispatch import Implementation
from jaxattn.kernels.moe.tile_config import GemmTileConfig, MoeTileConfig, choose

Shape = tuple[str, int, str]  # the model, T, the change

# Changes to the tiles of both products, or to `MoeTileConfig.columns`.
CHANGES: dict[str, dict[str, Any]] = {
    "as chosen": {},
    "64 rows": {"consumers": 1},
    "128 rows": {"consumers": 2},
    "step 64": {"depth": 64},
    "step 128": {"depth": 128},
    "3 stages": {"stages": 3},
    "4 stages": {"stages": 4},
    "one part": {"parts": 1},
    "two parts": {"parts": 2},
    "8 tokens": {"columns": 8},
    "16 tokens": {"columns": 16},
    "32 tokens": {"columns": 32},
    "64 tokens": {"columns": 64},
    "128 tokens": {"columns": 128},
    "narrow tiles": {"narrow": True},
    "whole tiles": {"narrow": False},
}


def _of(name: str, tokens: int, *changes: str) -> tuple[Shape, ...]:
    return tuple((name, tokens, change) for change in ("as chosen", *changes))


SHAPES: tuple[Shape, ...] = (
    *_of("v2-lite", 1, "128 rows", "step 64", "two parts", "4 stages"),
    *_of("v2-lite", 32, "64 rows", "step 128", "one part", "16 tokens", "4 stages"),
    *_of("v2-lite", 128, "64 rows", "step 128", "16 tokens", "64 tokens"),
    *_of("v2-lite", 2048, "narrow tiles", "whole tiles"),
    *_of("v2-lite", 8192, "64 tokens", "one part", "3 stages", "narrow tiles", "whole tiles"),
    *_of("qwen3-next-fp8", 1, "128 rows", "one part"),
    *_of("qwen3-next-fp8", 32, "64 rows", "one part", "16 tokens"),
    *_of("v3-fp8", 32, "64 rows", "one part", "16 tokens", "3 stages"),
)
MORE_SHAPES: tuple[Shape, ...] = ()
SMALL_SHAPES: tuple[Shape, ...] = ()


def label(shape: Shape) -> dict[str, str]:
    return {**moe.label(shape[:2]), "cut": shape[2]}


def cut(shape: Shape) -> MoeTileConfig:
    name, tokens, change = shape
    model = moe.MODELS[name]
    config = choose(
        tokens=tokens, top_k=model.router.top_k, experts=model.router.experts,
        hidden=model.hidden, expert_size=model.expert_size, quantized=model.fp8,
    )  # fmt: skip
    changed = dict(CHANGES[change])
    columns = changed.pop("columns", config.columns)

    def product(of: GemmTileConfig, gated: bool) -> GemmTileConfig:
        own = {key: value for key, value in changed.items() if not (gated and key == "parts")}
        return dataclasses.replace(of, **own)

    return dataclasses.replace(
        config,
        columns=columns,
        gate_up=product(config.gate_up, True),
        down=product(config.down, False),
    )


def measure(
    shape: Shape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table."""
    del implementation, xla
    config = cut(shape)
    op = moe.mixture(shape[:2], None, config)
    error = moe.check(op, shape[:2])
    time = kernel_seconds(op)
    flops, moved = moe.counts(shape[:2])
    return {
        **label(shape),
        "us": time * 1e6,
        **moe.parts(op),
        "TFLOP/s": flops / time / 1e12,
        "GB/s": moved / time / 1e9,
        "relative error": error,
    }
