"""compute-sanitizer over a launch of every kernel, on a Hopper GPU.

    python scripts/sanitize.py                      # memcheck, then racecheck
    python scripts/sanitize.py --tool memcheck --only mla_decode_e4m3 gdn_decode_bfloat16

The tool watches a process for each case. What XLA compiles, it compiles before that, in a process
that nobody watches, and leaves in a compilation cache: XLA's compiler crashes under the tool (jax
0.11.2, CUDA 13). `out_of_bounds` reads what is not there, and memcheck has to say so.

Exit status: 1 where a kernel has an error, or `out_of_bounds` none; 2 where the tool ended without
a verdict, as racecheck 2025.3 does of mla_decode_e4m3, mla_prefill and gdn_prefill_many.
"""

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn import (
    chunk_gated_delta_rule,
    gated_delta_net_decode,
    gated_delta_rule_prefill,
    mla_append,
    mla_decode,
)
from jaxattn.dispatch import Implementation
from jaxattn.mla import LatentFormat
from jaxattn.prefill import causal_attention
from jaxattn.rope import RopeConfig, rotation

TOOLS = {"memcheck": r"ERROR SUMMARY: (\d+) error", "racecheck": r"SUMMARY: (\d+) hazard"}
SECONDS = 300  # the most that a case may take
PAGE, DIM = 64, 576
DRAWN = np.random.default_rng(0)

# (op, arguments) of a case, for an implementation.
Case = Callable[[Implementation], tuple[Callable[..., Any], tuple[Any, ...]]]


def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Made by NumPy: nothing to compile."""
    return jax.device_put(DRAWN.normal(size=shape).astype(dtype))


def ints(values: Any) -> jax.Array:
    return jax.device_put(np.asarray(values, np.int32))


def pages_of(lens: list[int]) -> tuple[jax.Array, int]:
    """Block tables, with numbers of no page past a row's end; and how many pages there are."""
    needed = [-(-length // PAGE) for length in lens]
    tables = np.full((len(lens), max(needed)), 2147480000, np.int32)
    last = np.cumsum(needed)
    for row, (count, end) in enumerate(zip(needed, last, strict=True)):
        tables[row, :count] = np.arange(end - count, end)[::-1]
    return ints(tables), int(last[-1])


def decode(lens: list[int], heads: int, q_len: int = 1, cache: str = "bfloat16") -> Case:
    def case(implementation: Implementation) -> Any:
        tables, pages = pages_of(lens)
        scale = 0.05 if cache == "float8_e4m3fn" else None

        def op(q: Any, latents: Any, tables: Any, lens: Any) -> Any:
            kv_cache = latents
            if cache != "bfloat16":
                kv_cache = LatentFormat(cache).pack(latents, scale)
            return mla_decode(
                q, kv_cache, tables, lens, scale=0.07, kv_scale=scale, implementation=implementation
            )

        q = normal(len(lens), q_len, heads, DIM)
        return op, (q, normal(pages, PAGE, DIM), tables, ints(lens))

    return case


def append(implementation: Implementation) -> Any:
    lens = [70, 0, 1, 128]
    tables, pages = pages_of(lens)
    config = RopeConfig()
    positions = np.maximum(np.asarray(lens)[:, None] - 2 + np.arange(2), 0)

    def op(kv: Any, q: Any, weights: Any, cache: Any, tables: Any, lens: Any, turn: Any) -> Any:
        return mla_append(
            kv, q, weights, cache, tables, lens,
            rotation=turn, config=config, implementation=implementation,
        )  # fmt: skip

    weights = normal(DIM + 256, dtype=jnp.float32)
    turn = jax.jit(functools.partial(rotation, config=config))(ints(positions))
    inputs = normal(4, 2, DIM), normal(4, 2, 256), weights, normal(pages, PAGE, DIM)
    return op, (*inputs, tables, ints(lens), turn)


def prefill(implementation: Implementation) -> Any:
    def op(q: Any, k: Any, v: Any, k_pe: Any, lengths: Any) -> Any:
        return causal_attention(
            q, k, v, scale=0.07, lengths=lengths, k_pe=k_pe, implementation=implementation
        )

    shape = 2, 300, 4
    k, v = (normal(*shape, 128) for _ in range(2))
    return op, (normal(*shape, 192), k, v, normal(2, 300, 64), ints([300, 77]))


def delta_rule(lens: list[int], *, pool: bool = False) -> Case:
    def case(implementation: Implementation) -> Any:
        tokens, starts = sum(lens), np.cumsum([0, *lens])
        q, k = (normal(1, tokens, 2, 128) for _ in range(2))
        v, g = normal(1, tokens, 4, 128), -np.abs(normal(1, tokens, 4, dtype=jnp.float32))
        beta = jax.device_put(np.full((1, tokens, 4), 0.5, np.float32))

        def op(q: Any, k: Any, v: Any, g: Any, beta: Any, starts: Any, state: Any, slots: Any):
            if pool:
                return gated_delta_rule_prefill(
                    q, k, v, g, beta, state, slots,
                    cu_seqlens=starts, implementation=implementation,
                )  # fmt: skip
            return chunk_gated_delta_rule(
                q, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=starts,
                use_qk_l2norm=True, implementation=implementation,
            )  # fmt: skip

        states = normal(len(lens), 4, 128, 128, dtype=jnp.float32)
        slots = ints(np.arange(len(lens))[::-1])
        return op, (q, k, v, jax.device_put(np.asarray(g)), beta, ints(starts), states, slots)

    return case


def delta_net(dtype: str, q_len: int = 1, rows: int = 3) -> Case:
    def case(implementation: Implementation) -> Any:
        channels = (2 * 2 + 4) * 128
        slots = np.arange(rows)
        slots[-1] = -1

        def op(qkvz: Any, ba: Any, weights: Any, conv: Any, state: Any, slots: Any) -> Any:
            return gated_delta_net_decode(
                qkvz, ba, weights, conv, state, slots, layer=1, implementation=implementation
            )

        return op, (
            normal(rows, q_len, channels + 4 * 128),
            normal(rows, q_len, 8, dtype=jnp.float32),
            normal(2, 2 * 4 + 128 + 4 * channels, dtype=jnp.float32),
            normal(2, rows, 3, channels),
            normal(2, rows, 4, 128, 128, dtype=jnp.dtype(dtype)),
            ints(slots),
        )

    return case


def out_of_bounds(implementation: Implementation) -> Any:
    del implementation

    def body(x_ref: Any, at_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[pl.ds(at_ref[0], 128)]

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    return kernel, (normal(1024, dtype=jnp.float32), ints([2**31 - 1024]))


CASES: dict[str, Case] = {
    "mla_decode_few_rows": decode([200, 1, 700], 16),
    "mla_decode_many_rows": decode([65] * 139 + [3000], 16),
    "mla_decode_two_tiles": decode([300, 900], 128),
    "mla_decode_two_tokens": decode([300, 2], 64, q_len=2),
    "mla_decode_split": decode([4000], 128),
    "mla_decode_merged": decode([1500] * 15 + [9000], 128),
    "mla_decode_e4m3": decode([300, 700], 16, cache="float8_e4m3fn"),
    "mla_decode_block_scaled": decode([300, 700], 32, cache="uint8"),
    "mla_append": append,
    "mla_prefill": prefill,
    "gdn_prefill_short": delta_rule([63, 0, 1, 200]),
    "gdn_prefill_pool": delta_rule([63, 130], pool=True),
    "gdn_prefill_many": delta_rule([70] * 140),
    "gdn_prefill_segments": delta_rule([8192]),
    "gdn_decode_float32": delta_net("float32"),
    "gdn_decode_bfloat16": delta_net("bfloat16"),
    "gdn_decode_two_heads_a_block": delta_net("bfloat16", rows=150),
    "gdn_decode_tokens": delta_net("float32", q_len=4),
    "out_of_bounds": out_of_bounds,
}


def run(name: str, implementation: Implementation = "mosaic_gpu") -> None:
    """A case in this process."""
    op, arguments = CASES[name](implementation)
    out = jax.block_until_ready(jax.jit(op)(*arguments))
    first = np.asarray(jax.tree.leaves(out)[0], np.float32)
    print(f"{name}: {first.shape}, mean of squares {np.square(first).mean():.4g}")


def watched(tool: str, program: str, name: str, environment: dict[str, str]) -> tuple[int, str]:
    """(exit status of this script for it, what to print) of a case under a tool."""
    command = [program, "--tool", tool, sys.executable, __file__, "--case", name]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return 2, f"{tool} {name}: no verdict after {SECONDS} s"
    said = done.stdout + done.stderr
    found = re.findall(TOOLS[tool], said)
    # A case that failed before its kernel ran has no error either; the tool hands its status on.
    if not found or (done.returncode and int(found[-1]) == 0):
        return 2, f"{tool} {name}: no verdict, exit status {done.returncode}\n{said[-500:]}"
    count = int(found[-1])
    if name == "out_of_bounds":
        return int(count == 0), f"{tool} {name}: {count}, more than 0 wanted"
    lines = [line for line in said.splitlines() if line.startswith("=========")]
    return int(count > 0), "\n".join([f"{tool} {name}: {count}", *lines[: 12 * (count > 0)]])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--jobs", type=int, default=6, help="cases at a time")
    parser.add_argument("--case", choices=CASES, help="runs this case alone, which nobody watches")
    args = parser.parse_args()
    if args.case:
        run(args.case)
        return 0
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        parser.error("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(args.jobs) as pool:
        environment = os.environ | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

        def compiled(name: str) -> int:
            command = [sys.executable, __file__, "--case", name]
            # A read out of bounds may end the process: nobody else shares it.
            return subprocess.run(command, env=environment, timeout=SECONDS).returncode

        ended = dict(zip(args.only, pool.map(compiled, args.only), strict=True))
        failed = [name for name, status in ended.items() if status and name != "out_of_bounds"]
        if failed:
            print("failed without the tool:", *failed)
            return 1
        worst = 0
        for tool in args.tool:
            cases = [name for name in args.only if tool == "memcheck" or name != "out_of_bounds"]
            look = functools.partial(watched, tool, program, environment=environment)
            for status, said in pool.map(look, cases):
                print(said, flush=True)
                worst = 1 if 1 in (worst, status) else max(worst, status)
        return worst


if __name__ == "__main__":
    sys.exit(main())
