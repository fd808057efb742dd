"""`python -m jaxattn.bench mla`: paged MLA decode, checked and timed shape by shape.

Times are those of `timing`. They do not include the schedule, which a step computes once for all
layers, or a baseline's plan. The op does not check that lengths fit the tables: a step checks this
once for all layers, and the baselines do not check it. `invariant us` is `us` with splits that make
a row's bits independent of the other rows.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import mla
from jaxattn.bench.attention.shuffled_pages import shuffled_pages
from jaxattn.bench.harness import numpy_reference
from jaxattn.bench.harness.timing import TimedOp, columns, kernel_seconds, rotation
from jaxattn.core.cache.formats import LatentFormat
from jaxattn.core.dispatch import Implementation
from jaxattn.core.validation.array_checks import BoundedLengths

PAGE, DIM, RANK = 64, 576, 512
SCALE = 192**-0.5
KV_SCALE = 2.0**-6  # of e4m3 caches, so that normal data stay below 448 scales
# B, H, T, S. T is the length of every row; "1-8192", drawn from that range; "even 1-8192", the same
# total spread evenly; or "2048 of 65536", every row's length in a block table for more tokens.
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
    (8, 128, "2048 of 65536", 1),
    (32, 128, "2048 of 65536", 1),
    (32, 16, "2048 of 65536", 1),
)
SMALL_SHAPES: tuple[Shape, ...] = (
    (2, 16, 256, 1),
    (1, 20, 130, 2),
    (3, 16, "even 1-200", 1),
    (3, 16, "1-200", 1),
    (2, 16, "70 of 512", 1),
)
EVENLY = 1.08  # upper bound on the time of drawn lengths, relative to the same total spread evenly


def cache_format(shape: Shape) -> str:
    return "bfloat16"


def label(shape: Shape) -> dict[str, str]:
    return {"B,H,T,S": ",".join(map(str, shape))}


def room(tokens: int | str) -> tuple[int, int]:
    """(tokens of the longest row, tokens that a block table has room for)."""
    if isinstance(tokens, int):
        return tokens, tokens
    some, of, more = tokens.partition(" of ")
    most = int(some if of else tokens.split("-")[1])
    return most, int(more) if of else most


def lengths(batch: int, tokens: int | str) -> np.ndarray:
    """int32 [B], the tokens of each row, equal in every run."""
    if isinstance(tokens, int) or " of " in tokens:
        return np.full(batch, room(tokens)[0], np.int32)
    low, high = map(int, tokens.removeprefix("even ").split("-"))
    drawn = np.random.default_rng(0).integers(low, high, batch, np.int32, endpoint=True)
    if not tokens.startswith("even "):
        return drawn
    each, more = divmod(int(drawn.sum()), batch)
    return np.where(np.arange(batch) < more, each + 1, each).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def inputs(
    batch: int, heads: int, tokens: int | str, q_len: int, cache: str = "bfloat16"
) -> tuple[jax.Array, ...]:
    """Normal data on shuffled pages, with so many layers that L2 does not hold the caches."""
    latents = LatentFormat(cache)
    pages, width = (-(-most // PAGE) for most in room(tokens))
    layers = rotation(batch * pages * PAGE * latents.nbytes, max_inputs=32)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (batch, q_len, heads, DIM), jnp.bfloat16)
    stored = jax.random.normal(keys[1], (layers, batch * pages, PAGE, DIM), jnp.bfloat16)
    if latents.quantized:
        stored = latents.pack(stored, scale_of(cache))
    tables, _ = shuffled_pages(keys[2], batch, pages, pages * PAGE)
    tables = jnp.pad(tables, ((0, 0), (0, width - pages)))
    return q, stored, tables, jnp.asarray(lengths(batch, tokens))


def scale_of(cache: str) -> float | None:
    return KV_SCALE if LatentFormat(cache).per_tensor else None


@functools.partial(jax.jit, static_argnames=("q_len", "num_heads", "max_pages"))
def _schedules(lens: jax.Array, **static: Any) -> list[mla.Schedule]:
    """The usual schedule, and the batch-invariant one."""
    return [mla.decode_schedule(lens, batch_invariant=apart, **static) for apart in (False, True)]


def decode(
    arrays: tuple[jax.Array, ...], schedule: mla.Schedule, implementation: Implementation | None
) -> TimedOp:
    def call(operands, state, layer):
        (q, cache, tables, lens), schedule = operands
        within: Any = BoundedLengths(lens, tables.shape[1] * PAGE)
        out = mla.mla_decode(
            q,
            cache,
            tables,
            within,
            scale=SCALE,
            kv_scale=scale_of(cache.dtype.name),
            layer=layer,
            schedule=schedule,
            implementation=implementation,
        )
        return out, state

    return TimedOp(call, [(arrays, schedule)], layers=arrays[1].shape[0])


def check(op: TimedOp, shape: Shape) -> float:
    """The largest relative L2 error of up to 16 heads, against float64.

    It covers the first, last, shortest and longest row.

    Raises:
        AssertionError: an error of the output or the LSE is larger than rounding explains.
    """
    (q, cache, tables, lens), _ = op.operands[0]
    out, lse = op(0)
    drawn = lengths(shape[0], shape[2])
    kv_scale = scale_of(cache.dtype.name)
    heads = np.unique(np.linspace(0, shape[1] - 1, 16).astype(int))
    errors, lse_errors = [], []
    for row in {0, len(drawn) - 1, int(drawn.argmin()), int(drawn.argmax())}:
        length, q_len = int(lens[row]), q.shape[1]
        latents = LatentFormat(cache.dtype.name).unpack(cache[0, tables[row]], kv_scale)
        kv = numpy_reference.exact(latents).reshape(-1, DIM)[:length]
        last = np.repeat(length - q_len + np.arange(q_len), len(heads))
        queries = numpy_reference.exact(q[row])[:, heads].reshape(-1, DIM)
        seen = last >= 0  # a row may be shorter than its queries
        expected, expected_lse = numpy_reference.attention(
            queries[seen], kv, kv[:, :RANK], last[seen], SCALE
        )
        actual = np.asarray(out[row])[:, heads].reshape(-1, RANK)[seen]
        errors.append(numpy_reference.relative_l2(actual, expected))
        actual_lse = numpy_reference.exact(lse[row])[:, heads].reshape(-1)[seen]
        lse_errors.append(np.abs(actual_lse - expected_lse).max())
    return numpy_reference.accepted(f"mla {shape}", errors, lse_errors, below=4e-3, lse_below=1e-4)


def measure(
    shape: Shape,
    implementation: Implementation | None,
    *,
    xla: bool = False,
    cache: str = "bfloat16",
) -> dict[str, Any]:
    """Returns a row of the table; `xla` adds XLA's time. `cache` is a dtype of `LatentFormat`."""
    batch, heads, tokens, q_len = shape
    _, _, tables, lens = arrays = inputs(*shape, cache)
    schedule, invariant = _schedules(lens, q_len=q_len, num_heads=heads, max_pages=tables.shape[1])
    op = decode(arrays, schedule, implementation)
    error = check(op, shape)
    time, _ = times = op.times()
    op.operands = [(arrays, invariant)]  # of the same shapes, so nothing is recompiled
    error = max(error, check(op, shape))
    alone = kernel_seconds(op)
    xla_columns = {"xla us": decode(arrays, schedule, "xla").time() * 1e6} if xla else {}
    total = int(lengths(batch, tokens).sum())
    flops = 2 * heads * q_len * total * (DIM + RANK)
    moved = total * LatentFormat(cache).nbytes + batch * heads * q_len * (DIM + RANK) * 2
    return {
        **label(shape),
        **columns("us", times),
        "invariant us": alone * 1e6 if alone else "",
        **xla_columns,
        "TFLOP/s": flops / time / 1e12,
        "GB/s": moved / time / 1e9,
        "relative error": error,
    }


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The cost of drawn lengths relative to the same number of tokens spread evenly."""
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
