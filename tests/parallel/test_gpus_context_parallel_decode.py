r"""Outputs of MLA decode that meet in one launch: XLA's numbers, the same bits over many calls.

    timeout -s KILL 90 python -m pytest -m gpu -p no:xdist \
        tests/parallel/test_gpus_context_parallel_decode.py

Where one GPU never hears of another, the kernel ends the program with an error.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxattn import check_aliasing, mla
from jaxattn.arena import Arena
from jaxattn.core.cache.symmetric_buffer import SymmetricBuffer, with_addresses
from jaxattn.parallel import DeviceGroup, Parallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
]

PAGE, DIM, LAYERS = 64, 576, 4
SCALE = DIM**-0.5
# Tokens of a GPU's own pages: none on some GPUs, one block's, all blocks', another on each; none.
LENGTHS = [(0, 5, 0, 3), (7, 0, 64, 1), (700, 2000, 64, 1), (40_000, 39_999, 40_064, 1), (0,) * 4]
LAST = 4  # the first row's last token, which GPU 1 alone has


def lengths_of(gpus: int, rows: int) -> np.ndarray:
    """int32 [gpus, rows]."""
    return np.asarray([[LENGTHS[row][gpu % 4] for row in range(rows)] for gpu in range(gpus)])


def step_of(group: DeviceGroup, rows: int, heads: int, pages: int, implementation: str) -> Any:
    """(queries, pages, lengths, arena, mailbox) -> (outputs of each layer, arena, mailbox): in each
    layer another GPU comes late, and queries are of the layer before."""
    axes, gpus = group.parallel.axes("all"), group.parallel.gpus

    def step(queries: Any, kv_cache: Any, lens: Any, arena: Any, mailbox: Any) -> Any:
        tables = jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
        number = lax.axis_index(axes)
        options: Any = dict(num_heads=heads, max_pages=pages, page_size=PAGE)
        schedule = mla.decode_schedule(lens[0], q_len=1, batch_invariant=True, **options)

        def layer(carry: Any, at: jax.Array) -> Any:
            arena, mailbox = carry
            turns = jnp.where((at + number) % gpus == 0, 40, 0)
            ones = jnp.ones((512, 512), jnp.bfloat16)
            late = lax.fori_loop(0, turns, lambda _, x: (x @ x).clip(0, 1), ones)
            given = queries * (1 + at + (late[0, 0] > 1)).astype(queries.dtype)  # never greater
            out, arena, mailbox = mla.mla_decode_context_parallel(
                given,
                kv_cache[0],
                tables,
                lens[0],
                scale=SCALE,
                schedule=schedule,
                arena=arena,
                merge=mla.ContextParallelMerge(mailbox, axes),
                implementation=implementation,
            )
            return (arena, mailbox), out

        (arena, mailbox), out = lax.scan(layer, (arena, mailbox), jnp.arange(LAYERS))
        return out[None], arena, mailbox

    own, whole = group.each, PartitionSpec()
    specs = (whole, own, own, own, own)
    return jax.jit(group.step(step, specs, (own, own, own)), donate_argnums=(3, 4))


def results(
    group: DeviceGroup, rows: int, heads: int, implementation: str, calls: int = 0, last: float = 0
) -> np.ndarray:
    """float32 [GPUs, layers, rows, 1, heads / GPUs, 512]; the same bits in three calls. `last` is
    added to the first row's last token."""
    gpus, pages = group.parallel.gpus, -(-40_064 // PAGE)
    room = mla.merge_buffer_shape(rows, heads, max_pages=pages, page_size=PAGE)
    assert room is not None
    sizes: Any = dict(batch=rows, q_len=1, num_heads=heads, max_pages=pages, page_size=PAGE)

    def boxed() -> SymmetricBuffer:
        made = SymmetricBuffer.empty(gpus, *room)
        return SymmetricBuffer(made.inbox, made.counts + jnp.int32(calls), made.addresses)

    mailbox = jax.block_until_ready(group.make(boxed, group.each))
    mailbox = with_addresses(mailbox)
    arena = group.make(lambda: Arena.allocate(mla.scratch(**sizes)), group.each)
    kv_cache = group.make(functools.partial(drawn, rows * pages, last), group.each)
    queries = jax.random.normal(jax.random.key(7), (rows, 1, heads, DIM), jnp.bfloat16)
    queries = group.put(np.asarray(queries), PartitionSpec())
    lens = group.put(lengths_of(gpus, rows).astype(np.int32), group.each)
    step = step_of(group, rows, heads, pages, implementation)
    given = queries, kv_cache, lens
    compiled = step.lower(*given, arena, mailbox).compile()
    check_aliasing(compiled, slack=2**20)
    found = []
    for _ in range(3):
        out, arena, mailbox = compiled(*given, arena, mailbox)
        found.append(np.asarray(jax.block_until_ready(out)))
    for each in found[1:]:
        np.testing.assert_array_equal(each.view(np.uint16), found[0].view(np.uint16))
    return found[0].astype(np.float32)


def drawn(pages: int, last: float) -> jax.Array:
    numbers = jax.random.normal(jax.random.key(3), (1, pages, PAGE, DIM), jnp.bfloat16)
    return numbers.at[0, 0, LAST].add(last)


def group_of(gpus: int) -> DeviceGroup:
    if jax.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs; there are {jax.device_count()}")
    return DeviceGroup(Parallel(tensor=gpus, context=gpus), tuple(jax.devices()[:gpus]))


@pytest.mark.parametrize("gpus", (2, 4, 8))
@pytest.mark.parametrize(
    "rows, heads, calls", [(1, 32, 0), (5, 32, 2**31 - 5), (1, 128, 0), (3, 16, 2**31 - 20)]
)
def test_outputs_meet_as_xlas_do(gpus, rows, heads, calls):
    """Rows that are cut, that one block has whole, and without a token on some GPUs or on all."""
    group = group_of(gpus)
    xla, kernel = (
        results(group, rows, heads, implementation, calls)
        for implementation in ("xla", "mosaic_gpu")
    )
    for row in range(rows):
        one, other = xla[:, :, row], kernel[:, :, row]
        assert np.all(np.isfinite(other))
        error = np.linalg.norm(one - other) / max(np.linalg.norm(one), 1e-30)
        print(f"{gpus} GPUs, {heads} heads, row {row}: relative error {error:.2e}")
        assert error < 8e-3


@pytest.mark.parametrize("gpus", (2, 4, 8))
def test_a_nan_on_one_gpu_stays_in_its_row(gpus):
    """All GPUs' heads of the row are NaN, and the other rows have the bits that they had."""
    group = group_of(gpus)
    clean, found = (results(group, 3, 16, "mosaic_gpu", last=x) for x in (0, np.nan))
    assert np.isfinite(clean).all() and np.isnan(found[:, :, 0]).all()
    np.testing.assert_array_equal(found[:, :, 1:], clean[:, :, 1:])
