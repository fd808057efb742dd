"""Definitions of the docs' tables: the stored run, the rows and the columns of each."""

import functools
from collections.abc import Callable

from scripts.performance import serving
from scripts.performance.cells import (
    Claim,
    Row,
    Table,
    faster,
    faster_than_all,
    markdown,
    number,
    text,
)
from scripts.performance.several_gpus import SEVERAL_GPUS
from scripts.performance.whole_models import WHOLE_MODELS

BURST, SUSTAINED = "burst", "long loop"
flashmla = functools.partial(Claim, run="mla-flashmla", who="FlashMLA")
burst = functools.partial(flashmla, timed=BURST, ours="us", theirs="flashmla us")
sustained = functools.partial(flashmla, timed=SUSTAINED, ours="call us", theirs="flashmla call us")
delta_rule = functools.partial(Claim, timed=SUSTAINED, run="gdn-peers")
grouped = functools.partial(
    Claim, timed=SUSTAINED, ours="call us", theirs="fa3 call us", who="FlashAttention-3"
)

CLAIMS = (
    sustained(
        what="MLA decode, 64 rows of 8,192 tokens, 128 heads", shape={"B,H,T,S": "64,128,8192,1"}
    ),
    burst(what="MLA decode, 1 row of 32,768 tokens, 16 heads", shape={"B,H,T,S": "1,16,32768,1"}),
    Claim(
        what="MLA decode, 8 rows of 2,048 tokens, room for 65,536",
        timed=SUSTAINED,
        run="mla",
        shape={"B,H,T,S": "8,128,2048 of 65536,1"},
        ours="call us",
        theirs="flashinfer call us",
        who="FlashInfer",
    ),
    Claim(
        what="MLA decode, 128 rows of 1 to 8,192 tokens, 128 heads",
        timed=SUSTAINED,
        run="mla",
        shape={"B,H,T,S": "128,128,1-8192,1"},
        ours="call us",
        theirs="flashinfer call us",
        who="FlashInfer",
    ),
    grouped(
        what="GQA decode, 64 rows of 8,192 tokens, 32 heads on 8",
        run="gqa",
        shape={"B,H/Hk,D,T": "64,32/8,128,8192"},
    ),
    grouped(
        what="GQA prefill, a prompt of 8,192 tokens, 32 heads on 8",
        run="gqa-prefill",
        shape={"B,H/Hk,D,T": "1,32/8,128,8192"},
    ),
    delta_rule(
        what="delta rule decode, 1 row, 32 heads",
        shape={"B,Hk,Hv,S": "1,16,32,1"},
        ours="call us",
        theirs="fla call us",
        who="FLA",
    ),
    delta_rule(
        what="delta rule prefill, 4 prompts of 8,192 tokens, 32 heads",
        shape={"Hk/Hv": "16/32", "sequences": "4x8192"},
        ours="call ms",
        theirs="flashqla call ms",
        who="FlashQLA",
    ),
)


def claims() -> str:
    titles = ["what", "timed", "jaxattn, us", "other, us", "faster, by"]
    return markdown(titles, [claim.cells() for claim in CLAIMS])


US = number("us")


def _ratio(row: Row) -> str:
    if row["cache"] == "auto":
        return "1"
    return f"{row['over auto']} ({row['ratio from']} to {row['ratio to']})"


def _top_1(row: Row) -> str:
    return "100%" if row["cache"] == "auto" else f"{row['top-1 %']} ± {row['top-1 ±']}%"


TRAINED_BY_OTHERS = {
    "cuDNN": "cudnn ms",
    "tokamax": "tokamax ms",
    "FlashQLA": "flashqla ms",
    "FLA": "fla ms",
    "PyTorch with FLA": "torch (fla) ms",
    "PyTorch with FlashQLA": "torch (flashqla) ms",
}
RATES = {"TFLOP/s": number("TFLOP/s", 0), "GB/s": number("GB/s", 0)}
SEQUENCES = {"Hk/Hv": text("Hk/Hv"), "sequences": text("sequences")}

TABLES: dict[str, Callable[[], str]] = {
    "claims": claims,
    **SEVERAL_GPUS,
    **WHOLE_MODELS,
    "offline": serving.table(serving.OFFLINE, "offline"),
    "serve": serving.table(serving.SERVE, "serve"),
    "vllm": serving.compared,
    "mla-flashmla": Table(
        run="mla-flashmla",
        columns={
            "B,H,T,S": text("B,H,T,S"),
            "us, burst": US,
            "FlashMLA, burst": number("flashmla us"),
            "faster in bursts": faster("us", "flashmla us", "FlashMLA"),
            "us, long loop": number("call us"),
            "FlashMLA, long loop": number("flashmla call us"),
            "faster in loops": faster("call us", "flashmla call us", "FlashMLA"),
        },
    ),
    "mla-vllm-wheel": Table(
        run="mla-vllm-wheel",
        columns={
            "B,H,T,S": text("B,H,T,S"),
            "burst us": number("flashmla us"),
            "long loop us": number("flashmla call us"),
        },
    ),
    "mla": Table(
        run="mla",
        where=lambda row: "cache" not in row,
        columns={
            "B,H,T,S": text("B,H,T,S"),
            "us": US,
            **RATES,
            "equal bits us": number("invariant us"),
            "FlashInfer us": number("flashinfer us"),
            "vLLM's FlashMLA us": number("flashmla (vllm) us"),
            "call us": number("call us"),
            "FlashInfer call us": number("flashinfer call us"),
            "vLLM's FlashMLA call us": number("flashmla (vllm) call us"),
            "faster, by": faster("call us", "flashinfer call us", "FlashInfer"),
        },
    ),
    "gqa": Table(
        run="gqa",
        missing="Not timed yet: `python -m jaxattn.bench gqa` does, on an H100 or H200.",
        columns={
            "B,H/Hk,D,T": text("B,H/Hk,D,T"),
            "us": US,
            **RATES,
            "equal bits us": number("invariant us"),
            "FlashAttention-3 us": number("fa3 us"),
            "call us": number("call us"),
            "FlashAttention-3 call us": number("fa3 call us"),
            "faster in bursts": faster("us", "fa3 us", "FlashAttention-3"),
            "faster in loops": faster("call us", "fa3 call us", "FlashAttention-3"),
        },
    ),
    "gqa-turbo": Table(
        run="gqa-turbo",
        missing="Not timed yet beside vLLM's kernels: `python -m jaxattn.bench gqa` does.",
        columns={
            "B,H/Hk,D,T": text("B,H/Hk,D,T"),
            "cache": text("cache"),
            "us": US,
            "GB/s": RATES["GB/s"],
            "equal bits us": number("invariant us"),
            "vLLM us": number("vllm (jax-triton) us"),
            "call us": number("call us"),
            "vLLM call us": number("vllm (jax-triton) call us"),
            "faster in bursts": faster("us", "vllm (jax-triton) us", "vLLM"),
            "faster in loops": faster("call us", "vllm (jax-triton) call us", "vLLM"),
        },
    ),
    "gqa-prefill": Table(
        run="gqa-prefill",
        columns={
            "B,H/Hk,D,T": text("B,H/Hk,D,T"),
            "us": US,
            "TFLOP/s": RATES["TFLOP/s"],
            "FlashAttention-3 us": number("fa3 us"),
            "cuDNN, TFLOP/s": number("cuDNN, TFLOP/s", 0),
            "call us": number("call us"),
            "FlashAttention-3 call us": number("fa3 call us"),
            "faster in bursts": faster("us", "fa3 us", "FlashAttention-3"),
            "faster in loops": faster("call us", "fa3 call us", "FlashAttention-3"),
        },
    ),
    "mla-cache": Table(
        run="mla",
        where=lambda row: "cache" in row,
        columns={
            "B,H,T,S": text("B,H,T,S"),
            "cache": text("cache"),
            "us": US,
            "GB/s": RATES["GB/s"],
        },
    ),
    "gdn-decode": Table(
        run="gdn",
        where=lambda row: "us" in row,
        columns={
            "B,Hk,Hv,S": text("B,Hk,Hv,S"),
            "state": text("state"),
            "us": US,
            "call us": number("call us"),
            "GB/s": RATES["GB/s"],
        },
    ),
    "gdn-prefill": Table(
        run="gdn",
        where=lambda row: "weak ms" in row,
        columns={
            **SEQUENCES,
            "ms": number("ms", 3),
            "weak gates ms": number("weak ms", 3),
            "call ms": number("call ms", 3),
            "TFLOP/s": RATES["TFLOP/s"],
        },
    ),
    "gdn-norm": Table(
        run="gdn",
        where=lambda row: row.get("output") == "normed",
        columns={
            **SEQUENCES,
            "norm inside ms": number("ms", 3),
            "with XLA's norm ms": number("XLA norm ms", 3),
        },
    ),
    "gdn-peers-decode": Table(
        run="gdn-peers",
        where=lambda row: "us" in row,
        columns={
            "B,Hk,Hv,S": text("B,Hk,Hv,S"),
            "us": US,
            "call us": number("call us"),
            "FLA call us": number("fla call us"),
            "faster, by": faster("call us", "fla call us", "FLA"),
        },
    ),
    "gdn-peers-prefill": Table(
        run="gdn-peers",
        where=lambda row: "ms" in row,
        columns={
            **SEQUENCES,
            "ms": number("ms", 3),
            "call ms": number("call ms", 3),
            "FLA call ms": number("fla call ms", 3),
            "FlashQLA call ms": number("flashqla call ms", 3),
        },
    ),
    "mla-prefill": Table(
        run="mla-prefill",
        columns={
            "B,T,H,prefix": text("B,T,H,prefix"),
            "us": US,
            "FlashAttention-3 us": number("fa3 us"),
            "faster, by": faster("us", "fa3 us", "FlashAttention-3"),
            "TFLOP/s": RATES["TFLOP/s"],
            "JAX's at width 128": number("jax's, 128, TFLOP/s", 0),
            "at width 256": number("jax's, 256, TFLOP/s", 0),
        },
    ),
    "mla-prefill-fa3": Table(
        run="mla-prefill-fa3",
        columns={
            "B,T,H,prefix": text("B,T,H,prefix"),
            "us, burst": US,
            "TFLOP/s": number("TFLOP/s", 0),
            "FlashAttention-3, burst": number("fa3 us"),
            "faster in bursts": faster("us", "fa3 us", "FlashAttention-3"),
            "us, long loop": number("call us"),
            "FlashAttention-3, long loop": number("fa3 call us"),
            "faster in loops": faster("call us", "fa3 call us", "FlashAttention-3"),
        },
    ),
    "moe": Table(
        run="moe",
        columns={
            "experts of": text("model"),
            "tokens": text("T"),
            "us": US,
            "call us": number("call us"),
            "MB": number("MB", 0),
            **RATES,
        },
    ),
    "train": Table(
        run="train",
        columns={
            "op": text("op"),
            "rows x tokens": text("sequences"),
            "forward ms": number("forward ms", 2),
            "backward ms": number("backward ms", 2),
            "both ms": number("ms", 2),
            **{f"{who} ms": number(key, 2) for who, key in TRAINED_BY_OTHERS.items()},
            "faster, by": faster_than_all("ms", TRAINED_BY_OTHERS),
            "temporary MiB": number("MiB", 0),
        },
    ),
    "quality": Table(
        run="quality-smollm2-135m",
        where=lambda row: row["by"] == "decode",
        columns={
            "format": lambda row: f"`{row['cache']}`",
            "perplexity": number("perplexity", 2),
            "ratio to `auto`": _ratio,
            "top-1": _top_1,
        },
    ),
    "gradients": Table(
        run="gradients",
        columns={
            "op": text("op"),
            "rows x tokens": text("shape"),
            "forward, MiB": number("forward GiB", times=1024),
            "with gradient, MiB": number("with gradient GiB", 0, times=1024),
        },
    ),
}
