"""`python -m jaxattn.bench mla`: paged MLA decode, checked and timed shape by shape.

`us` is GPU time of the decode and combine kernels, from a profile: what a layer of a step takes,
whose schedule is made once. `invariant us` is the same where rows are cut so that a row's bits do
not depend on the others. `call us` is a call's share of a loop of calls.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import mla
from jaxattn.arena import Arena
from jaxattn.bench.timing import ROTATE_BYTES, per_call, profile
from jaxattn.dispatch import Implementation
from jaxattn.mla_cache import LatentFormat

PAGE, DIM, RANK = 64, 576, 512
PROFILED = 10  # calls
SCALE = 192**-0.5
KV_SCALE = 2.0**-6  # of e4m3 caches: normal data stays below 448 of it
# B, H, T, S. T is every row's, or "1-8192", drawn from there, or "even 1-8192", as many tokens
# spread evenly.
Shape = tuple[int, int, int | str, int]
SHAPES: tuple[Shape, ...] = (
    (128, 128, 4096, 1),
    (64, 128, 8192, 1),
    (16, 128, 8192, 1),
    (128, 64, 4096, 1),
    (128, 16, 4096, 1),
    (1, 128, 65536, 1),
    (1, 128, 8192, 1),
    (1, 16, 32768, 1),
    (64, 128, 4096, 2),
    (128, 128, "even 1-8192", 1),
    (128, 128, "1-8192", 1),
)
MORE_SHAPES: tuple[Shape, ...] = (
    (256, 128, 2048, 1),
    (512, 128, 1024, 1),
    (128, 16, "even 1-8192", 1),
    (128, 16, "1-8192", 1),
)
SMALL_SHAPES: tuple[Shape, ...] = (
    (2, 16, 256, 1),
    (1, 20, 130, 2),
    (3, 16, "even 1-200", 1),
    (3, 16, "1-200", 1),
)
_schedule = jax.jit(
    mla.decode_schedule, static_argnames=("q_len", "num_heads", "max_pages", "batch_invariant")
)
EVENLY = 1.08  # what drawn lengths may take of the time of as many tokens spread evenly


def lengths(batch: int, tokens: int | str) -> np.ndarray:
    """int32 [B], the tokens of each row: the same ones in every run."""
    if isinstance(tokens, int):
        return np.full(batch, tokens, np.int32)
    low, high = map(int, tokens.removeprefix("even ").split("-"))
    drawn = np.random.default_rng(0).integers(low, high, batch, np.int32, endpoint=True)
    if not tokens.startswith("even "):
        return drawn
    each, more = divmod(int(drawn.sum()), batch)
    return np.where(np.arange(batch) < more, each + 1, each).astype(np.int32)


def inputs(
    batch: int, heads: int, tokens: int | str, q_len: int, cache: str = "bfloat16"
) -> tuple[jax.Array, ...]:
    """Normal data on shuffled pages, in as many layers as keep the caches out of L2."""
    latents = LatentFormat(cache)
    longest = tokens if isinstance(tokens, int) else int(tokens.split("-")[1])
    pages = -(-longest // PAGE)
    layers = max(1, min(32, ROTATE_BYTES // (batch * pages * PAGE * latents.nbytes)))
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (batch, q_len, heads, DIM), jnp.bfloat16)
    stored = jax.random.normal(keys[1], (layers, batch * pages, PAGE, DIM), jnp.bfloat16)
    if latents.quantized:
        stored = jax.jit(latents.pack)(stored, scale_of(cache))
    tables = jax.random.permutation(keys[2], batch * pages).reshape(batch, pages)
    return q, stored, tables.astype(jnp.int32), jnp.asarray(lengths(batch, tokens))


def scale_of(cache: str) -> float | None:
    return KV_SCALE if LatentFormat(cache).per_tensor else None


def worst_error(out: jax.Array, expected: jax.Array) -> float:
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected))


def measure(
    shape: Shape,
    implementation: Implementation | None,
    *,
    xla: bool = False,
    cache: str = "bfloat16",
) -> dict[str, Any]:
    """A row of the table; with `xla` also XLA's time. `cache` is a dtype of `LatentFormat`."""
    batch, heads, tokens, q_len = shape
    q, stored, tables, lens = arrays = inputs(*shape, cache)
    layers, pages = stored.shape[0], tables.shape[1]
    with_scale: Any = functools.partial(mla.mla_decode, scale=SCALE, kv_scale=scale_of(cache))
    decode = functools.partial(with_scale, implementation=implementation)
    schedule, invariant = (
        _schedule(lens, q_len=q_len, num_heads=heads, max_pages=pages, batch_invariant=apart)
        for apart in (False, True)
    )

    # The check takes the rows that a float32 reference of this length can hold.
    rows = max(1, min(batch, 2**20 // (pages * PAGE)))
    few = (q[:rows], stored, tables[:rows], lens[:rows])
    by_xla = functools.partial(with_scale, implementation="xla")
    expected, _ = jax.jit(by_xla)(*few, layer=layers - 1)
    run = jax.jit(decode)
    outs = [run(*arrays, layer=layers - 1, schedule=each)[0] for each in (schedule, invariant)]
    error = max(worst_error(out[:rows], expected) for out in outs)
    if not error < 4e-3:
        raise AssertionError(f"mla {shape}: relative error {error} against the reference")
    del outs

    kernels = _kernel_time(decode, arrays, layers, schedule)
    alone = kernels and _kernel_time(decode, arrays, layers, invariant)
    time = _call_time(decode, arrays, schedule)
    # The arrays were donated. XLA's own are made where they are timed.
    beside = {"xla us": _call_time(by_xla, inputs(*shape, cache), schedule, 4) * 1e6} if xla else {}
    counted = kernels or time
    total = int(lengths(batch, tokens).sum())
    flops = 2 * heads * q_len * total * (DIM + RANK)
    moved = total * LatentFormat(cache).nbytes + batch * heads * q_len * (DIM + RANK) * 2
    return {
        "B,H,T,S": ",".join(map(str, shape)),
        "us": counted * 1e6,
        "call us": time * 1e6,
        "invariant us": alone * 1e6 if alone else "",
        **beside,
        "TFLOP/s": flops / counted / 1e12,
        "GB/s": moved / counted / 1e9,
        "relative error": error,
    }


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the drawn lengths cost, beside as many tokens spread evenly."""
    times = {row["B,H,T,S"]: row["us"] for row in rows}
    said = []
    for name, time in times.items():
        batch, heads, tokens, q_len = name.split(",")
        even = times.get(f"{batch},{heads},even {tokens},{q_len}")
        if even:
            said.append(
                f"{name}: {time / even:.3f} of the time of as many tokens spread evenly (wanted: "
                f"at most {EVENLY})"
            )
    return said


def _call_time(
    decode: functools.partial[Any],
    arrays: tuple[jax.Array, ...],
    schedule: mla.Schedule,
    calls: int = 16,
) -> float:
    """Seconds of a call in a loop of calls; the arrays are donated."""
    batch, q_len, heads, _ = arrays[0].shape
    layers, pages = arrays[1].shape[0], arrays[2].shape[1]
    spec = mla.scratch(batch=batch, q_len=q_len, num_heads=heads, max_pages=pages)

    # The arena goes from call to call, as in a step. Arrays that a loop closes over would be
    # compiled into it.
    def call(carry: Any, i: jax.Array) -> Any:
        arena, (q, cache, tables, lens), schedule = carry
        out, _, arena = decode(
            q, cache, tables, lens, layer=i % layers, schedule=schedule, arena=arena
        )
        if decode.keywords["implementation"] == "xla" or jax.default_backend() != "gpu":
            # XLA would drop an output that the next call overwrites; a kernel is opaque to it.
            lens = jnp.where(jnp.isnan(out[0, 0, 0, 0]), 0, lens)
        return arena, (q, cache, tables, lens), schedule

    # A copy: the schedule is used again.
    carry = (Arena.allocate(spec), arrays, jax.tree.map(jnp.copy, schedule))
    return per_call(call, carry, calls=calls)


def _kernel_time(decode: Any, arrays: tuple[Any, ...], layers: int, schedule: Any) -> float:
    """Seconds of the kernels of a call; 0 where none ran."""
    step = jax.jit(decode)

    def run():
        return [step(*arrays, layer=i % layers, schedule=schedule)[0] for i in range(PROFILED)][-1]

    jax.block_until_ready(run())
    spent, _ = profile(run)
    return sum(time for name, time in spent.items() if "mla_decode" in name) / PROFILED
