"""Shared parts of kernel tests: where a kernel runs, float64 oracles, and poisoned inputs.

Poison is NaN in every page and slot that no row owns, every page's tail and every other layer.
Block tables end with invalid page numbers.
"""

import contextlib
import dataclasses
import functools
import unittest.mock
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxattn.kernels.gdn.decode import launch as gdn_decode
from jaxattn.kernels.gdn.decode.arguments import GdnDecodeCall
from jaxattn.kernels.gdn.decode.mainloop import GdnDecodeTileConfig
from jaxattn.kernels.mla.decode.arguments import MlaDecodeCall
from jaxattn.kernels.mla.decode.launch import mla_decode_mosaic

NO_SUCH_PAGE = 2147480000

# A test with this parameter runs in the interpreter everywhere, and on the GPU if there is one.
both_devices = pytest.mark.parametrize(
    "implementation",
    ["mosaic_gpu_interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)],
)


def behind(numbers: int, cache: Array, tables: np.ndarray) -> tuple[Array, np.ndarray]:
    """A stack of layers and its block tables, with `numbers` or more numbers before the last.

    The added numbers are NaN, or 255 in bytes.
    """
    layers, pages = cache.shape[:2]
    more = -(-numbers // (layers * cache[0, 0].size))
    nothing = 255 if cache.dtype == np.uint8 else np.nan

    @jax.jit
    def moved(cache: Array) -> Array:
        before = jnp.full((layers, more, *cache.shape[2:]), nothing, cache.dtype)
        return jnp.concatenate([before, cache], axis=1)

    return moved(cache), np.where(tables < pages, tables + more, tables).astype(np.int32)


def slow(*case: object) -> object:
    """A parameter that the interpreter runs only with --slow.

    Other cases check the same; the test's `slow_cases` names them.
    """
    return pytest.param(*case, marks=pytest.mark.slow)


def slow_interpreted(reason: str, *others: str) -> pytest.MarkDecorator:
    """Like `both_devices`, but the interpreter runs the test only with --slow.

    The reason says what the test finds, and which test without --slow finds it too. A GPU and
    `others` always run the test.
    """
    interpreted = pytest.param("mosaic_gpu_interpret", marks=pytest.mark.slow(reason=reason))
    compiled = pytest.param("mosaic_gpu", marks=pytest.mark.gpu)
    return pytest.mark.parametrize("implementation", [*others, interpreted, compiled])


@functools.partial(jax.jit, static_argnames=("shape", "layer"))
def poisoned(
    places: np.ndarray, values: np.ndarray, *, shape: tuple[int, ...], layer: int
) -> Array:
    """A stack [L, N, ...] of NaN, in which one layer has the values [n, ...] at places [n]."""
    return jnp.full(shape, jnp.nan, values.dtype).at[layer, places].set(values)


@dataclasses.dataclass
class MLACase:
    q: Array  # [B, S, H, 576]
    kv_cache: Array  # [L, N, C, 576]
    block_tables: Array
    seq_lens: Array
    layer: int
    scale: float = 192**-0.5
    query_lens: Array | None = None

    @property
    def args(self) -> tuple[Array, Array, Array, Array]:
        return self.q, self.kv_cache, self.block_tables, self.seq_lens


def mla_case(
    lens: list[int],
    *,
    q_len: int = 1,
    heads: int = 64,
    dtype=jnp.bfloat16,
    page: int = 64,
    layers: int = 2,
    layer: int = 1,
    first_page: int = 0,
    dim: int = 576,
    table_tail: int = NO_SUCH_PAGE,
    clamped: bool = False,
    seed: int = 0,
) -> MLACase:
    """Random queries, and a poisoned cache whose rows hold `lens` tokens on shuffled pages.

    Numbers are normal or, if `clamped` as in FlashMLA's tests, a tenth of that and clipped to [-1,
    1].
    """
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        numbers = rng.normal(size=shape)
        return np.clip(numbers / 10, -1, 1) if clamped else numbers

    needed = [-(-n // page) for n in lens]
    pages = first_page + sum(needed) + 3
    shuffled = iter(first_page + rng.permutation(pages - first_page))
    tables = np.full((len(lens), max(needed) + 2), table_tail, np.int32)
    owned: list[int] = []
    blocks = np.full((sum(needed), page, dim), np.nan, np.float32)
    for row, length in enumerate(lens):
        for j in range(needed[row]):
            tables[row, j] = next(shuffled)
            valid = min(page, length - j * page)
            blocks[len(owned), :valid] = draw(valid, dim)
            owned.append(tables[row, j])
    shape = (layers, pages, page, dim)
    cache = poisoned(np.array(owned, np.int32), blocks.astype(dtype), shape=shape, layer=layer)
    q = jnp.asarray(draw(len(lens), q_len, heads, dim).astype(dtype))
    return MLACase(q, cache, jnp.asarray(tables), jnp.asarray(lens, jnp.int32), layer)


def launch_mla_decode(
    q: Array,
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    columns: bool | None = None,
    output_by_tma: bool | None = None,
    interpret: bool = False,
    detect_races: bool = False,
    **asked,
) -> tuple[Array, ...]:
    """Launches the kernel for a call with these arguments, without the op's checks."""
    call = MlaDecodeCall(
        q=q, kv_cache=kv_cache, block_tables=block_tables, seq_lens=seq_lens, **asked
    )
    return mla_decode_mosaic(
        call, columns=columns, output_by_tma=output_by_tma, interpret=interpret,
        detect_races=detect_races,
    )  # fmt: skip


def mla_oracle(case: MLACase) -> tuple[np.ndarray, np.ndarray]:
    """(out [B, S, H, 512], lse [B, S, H]) in float64; (0, -inf) if a row sees no key."""
    q = np.asarray(case.q, np.float64)
    page = case.kv_cache.shape[2]
    batch, q_len, heads, dim = q.shape
    out, lse = np.zeros((batch, q_len, heads, 512)), np.full((batch, q_len, heads), -np.inf)
    tables, lens = np.asarray(case.block_tables), np.asarray(case.seq_lens)
    queries = np.full(batch, q_len) if case.query_lens is None else np.asarray(case.query_lens)
    owned = [tables[b, : -(-lens[b] // page)] for b in range(batch)]
    pages = np.asarray(case.kv_cache[case.layer, np.concatenate(owned)])  # of all rows at once
    for b, held in enumerate(np.split(pages, np.cumsum([len(some) for some in owned])[:-1])):
        keys = held.astype(np.float64).reshape(-1, dim)
        for s in range(queries[b]):
            visible = lens[b] - (queries[b] - 1) + s
            if visible <= 0:
                continue
            scores = q[b, s] @ keys[:visible].T * case.scale
            top = scores.max(axis=-1, keepdims=True)
            p = np.exp(scores - top)
            total = p.sum(axis=-1, keepdims=True)
            out[b, s] = p / total @ keys[:visible, :512]
            lse[b, s] = (top + np.log(total))[:, 0]
    return out, lse


def assert_mla_close(
    case: MLACase, out: Array, lse: Array, *, each: bool = False, lse_rtol: float = 0.0
) -> None:
    """Compares with the oracle: P is rounded to the queries' dtype before the product with V.

    So each output row is within 2/128 of its largest value and 4e-3 in relative L2. With `each`,
    for `clamped` cases, each number is within 2/128 of itself or 1e-3. The LSE is within 1e-5, plus
    `lse_rtol` of itself if it is so large that float32 is no finer.
    """
    expected, expected_lse = mla_oracle(case)
    error = np.abs(np.asarray(out, np.float64) - expected)
    if each:
        assert (error <= np.maximum(1e-3, 2 / 128 * np.abs(expected))).all(), error.max()
    error = error.max(axis=-1)
    assert (error <= 2 / 128 * np.abs(expected).max(axis=-1)).all(), error.max()
    assert relative(out, expected) < 4e-3
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    lse = np.asarray(lse, np.float64)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5, rtol=lse_rtol)


@dataclasses.dataclass
class GDNCase:
    q: Array  # [B, S, Hk, 128]
    k: Array
    v: Array  # [B, S, Hv, 128]
    a: Array  # [B, S, Hv]
    b: Array
    state: Array  # [L, Z, Hv, 128, 128]
    state_indices: Array
    A_log: Array
    dt_bias: Array
    layer: int

    @property
    def args(self) -> tuple[Array, ...]:
        return self.q, self.k, self.v, self.a, self.b, self.state, self.state_indices

    @property
    def gates(self) -> dict[str, Array]:
        return {"A_log": self.A_log, "dt_bias": self.dt_bias}


def gdn_case(
    slots: list[int],
    *,
    num_slots: int,
    q_len: int = 1,
    key_heads: int = 1,
    value_heads: int = 2,
    dtype=jnp.bfloat16,
    layers: int = 2,
    layer: int = 1,
    seed: int = 0,
) -> GDNCase:
    """Random inputs, and a pool in which every state that no row owns is NaN."""
    rng = np.random.default_rng(seed)
    batch = len(slots)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(dtype))  # noqa: E731
    live = np.array([slot for slot in slots if slot >= 0], np.int32)
    shape = (layers, num_slots, value_heads, 128, 128)
    states = rng.normal(size=(len(live), *shape[2:])).astype(np.float32)
    return GDNCase(
        q=draw(batch, q_len, key_heads, 128),
        k=draw(batch, q_len, key_heads, 128),
        v=draw(batch, q_len, value_heads, 128),
        a=draw(batch, q_len, value_heads),
        b=draw(batch, q_len, value_heads),
        state=poisoned(live, states, shape=shape, layer=layer),
        state_indices=jnp.asarray(slots, jnp.int32),
        A_log=jnp.asarray(np.log(rng.uniform(0.1, 16, value_heads)), jnp.float32),
        dt_bias=jnp.asarray(rng.normal(size=value_heads), jnp.float32),
        layer=layer,
    )


def launch_gdn_decode(
    op: str,
    qkvz: Array,
    ba: Array,
    weights: Array,
    conv_state: Array | None,
    state: Array,
    reads: Array,
    writes: Array,
    *,
    config: GdnDecodeTileConfig | None = None,
    interpret: bool = False,
    detect_races: bool = False,
    **asked,
) -> tuple[Array, ...]:
    """Launches the kernel for a call with these arguments, without the op's checks."""
    call = GdnDecodeCall(
        op=op, qkvz=qkvz, ba=ba, weights=weights, conv_state=conv_state, state=state, reads=reads,
        writes=writes, **asked,
    )  # fmt: skip
    return gdn_decode.gdn_decode_mosaic(
        call, config=config, interpret=interpret, detect_races=detect_races
    )


def gdn_oracle(case: GDNCase) -> tuple[np.ndarray, np.ndarray]:
    """(o [B, S, Hv, 128], state [L, Z, Hv, 128, 128]), token by token in float64."""
    q, k, v, a, b = (np.asarray(x, np.float64) for x in case.args[:5])
    q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    gate = np.log1p(np.exp(a + np.asarray(case.dt_bias, np.float64)))
    decay = np.exp(-np.exp(np.asarray(case.A_log, np.float64)) * gate)
    beta = 1 / (1 + np.exp(-b))
    state = np.asarray(case.state, np.float64)
    batch, q_len, heads, dim = v.shape
    out = np.zeros(v.shape)
    for row, slot in enumerate(np.asarray(case.state_indices)):
        for head in range(heads if slot >= 0 else 0):
            key_head = head // (heads // q.shape[2])
            memory = state[case.layer, slot, head]
            for t in range(q_len):
                memory = memory * decay[row, t, head]
                key = k[row, t, key_head]
                delta = beta[row, t, head] * (v[row, t, head] - memory @ key)
                memory = memory + np.outer(delta, key)
                out[row, t, head] = dim**-0.5 * memory @ q[row, t, key_head]
            state[case.layer, slot, head] = memory
    return out, state


def relative(actual: Array, expected: np.ndarray) -> float:
    """Relative L2 error."""
    difference = np.asarray(actual, np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


@contextlib.contextmanager
def no_races() -> Iterator[None]:
    """Asserts that kernels interpreted inside, with `detect_races`, have no races.

    It covers all of them, while JAX's `get_races` covers only the last. Wait for their results
    inside.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    states = []

    def recorded(**kwargs):
        states.append(race_detection(**kwargs))
        return states[-1]

    race_detection = gpu_callbacks.GPURaceDetectionState
    with unittest.mock.patch.object(gpu_callbacks, "GPURaceDetectionState", recorded):
        yield
    assert states and not any(state.races_found for state in states)


@contextlib.contextmanager
def one_block_a_head() -> Iterator[None]:
    """A context in which traced kernels do not split a state over several blocks."""
    with unittest.mock.patch.object(gdn_decode, "SPLIT", 2**31):
        yield


def assert_alike(results, others) -> None:
    """Compares the results of two kernel bodies for the same inputs, without arenas."""
    for x, y in zip(jax.tree.leaves(results)[:3], jax.tree.leaves(others)[:3], strict=True):
        x, y = (np.asarray(x, np.float64) for x in (x, y))
        finite = np.isfinite(x)
        np.testing.assert_array_equal(np.where(finite, 0, x), np.where(np.isfinite(y), 0, y))
        assert relative(x[finite], y[finite]) < 5e-3 if y[finite].any() else not x[finite].any()


@contextlib.contextmanager
def x64() -> Iterator[None]:
    """Enables 64-bit types in the whole process, as the interpreter's threads need."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)
