"""TurboQuant: a second implementation of the format in float64 NumPy, and poisoned caches.

The implementation follows only the documents: numbers and layout are written out here, and it calls
none of the package's functions.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from jaxattn.core.turboquant.codec import TurboFormat
from jaxattn.kernels.turboquant.arguments import TurboDecodeCall
from jaxattn.kernels.turboquant.launch import turbo_decode_mosaic
from tests.helpers.kernel_cases import NO_SUCH_PAGE, relative
from tests.helpers.turbo_compiled import slot_pages

POSITIVE = {4: [0.140625, 0.40625, 0.6875, 1, 1.375, 1.75, 2.25, 3], 3: [0.375, 1.125, 2, 3.25]}
UNITS = {4: 1.085, 3: 1.505}
BITS = {"k8v4": (8, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}


def hadamard64(dim: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < dim:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(dim)


def table64(bits: int) -> np.ndarray:
    positive = np.array(POSITIVE[bits])
    return np.concatenate([-positive[::-1], positive])


def quantize64(preset: str, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The keys [*t, D], rotated if they are stored so, and the values after quantization."""
    key_bits, value_bits = BITS[preset]
    if key_bits == 8:
        keys = np.clip(k, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        table, dim = table64(key_bits), k.shape[-1]
        norm = np.linalg.norm(k, axis=-1, keepdims=True)
        y = (k / np.where(norm == 0, 1, norm)) @ hadamard64(dim)
        codes = np.searchsorted((table[1:] + table[:-1]) / 2, y * UNITS[key_bits] * dim**0.5)
        chosen = table[codes]
        keys = chosen * half(norm / np.linalg.norm(chosen, axis=-1, keepdims=True))
    most = 2**value_bits - 1
    low = half(v.min(axis=-1, keepdims=True))
    step = half((v.max(axis=-1, keepdims=True) - v.min(axis=-1, keepdims=True)) / most)
    codes = np.clip(np.floor((v - low) / np.where(step > 0, step, np.inf) + 0.5), 0, most)
    return keys, low + step * codes


def half(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float64)


@np.errstate(invalid="ignore")  # poison may be an infinity
def read_page(form: TurboFormat, page: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(keys [C, D] as stored, values [C, D]) of one head's page, in the documented layout."""
    key_bits, value_bits = BITS[form.preset]
    dim = form.head_dim
    groups = page.reshape(-1, 16 * form.slot_bytes)
    ends = [16 * dim * key_bits // 8]
    ends.append(ends[0] + 16 * dim * value_bits // 8)
    kept, some_values, numbers = np.split(groups, ends, axis=1)
    halves = np.ascontiguousarray(numbers).view(np.float16).reshape(len(groups), -1, 16)
    halves = halves.astype(np.float64).swapaxes(1, 2)  # [groups, 16, norm, scale, minimum]
    token, d = np.arange(16)[:, None], np.arange(dim)
    value_codes = _value_codes(some_values, token, d, value_bits, dim)
    values = halves[..., -1:] + halves[..., -2:-1] * value_codes
    if key_bits == 8:
        c, j, t, i = d // 32, d // 16 % 2, d // 4 % 4, d % 4
        at = ((((c * 8 + token % 8) * 4 + t) * 2 + j) * 2 + token // 8) * 4 + i
        keys = kept[:, at].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        keys = table64(key_bits)[_key_codes(kept, token, d, key_bits)] * halves[..., :1]
    return keys.reshape(-1, dim), values.reshape(-1, dim)


def _nibble(some: np.ndarray, at: np.ndarray) -> np.ndarray:
    return some[:, at // 2] >> (4 * (at % 2)).astype(np.uint8) & 15


def _key_codes(some: np.ndarray, token: Any, d: Any, bits: int) -> np.ndarray:
    b, g, h = d // 64, token % 8, token // 8
    c, j, q, t, i = d // 32 % 2, d // 16 % 2, d // 16 % 4, d // 4 % 4, d % 4
    if bits == 4:
        word = 8 * ((((b * 8 + g) * 4 + t) * 2 + c) * 2 + h)
        size = _nibble(some, word + 4 * j + i) & 7
        below = _nibble(some, word + np.where(j == 0, 2 * i + 1, 2 * i)) >> 3
        return np.where(below == 1, 7 - size, 8 + size)
    blocks = d.size // 64
    three = [4 * ((((g * 4 + t) * blocks + b) * 3 + r) * 2 + h) + i for r in range(3)]
    own = [_nibble(some, at) & 7 for at in three]
    fourth = sum((_nibble(some, at) >> 3) << 2 - r for r, at in enumerate(three))
    return np.select([q == r for r in range(3)], own, fourth)


def _value_codes(some: np.ndarray, token: Any, d: Any, bits: int, dim: int) -> np.ndarray:
    m, w, h, g = d // 64, d // 16 % 4, d // 8 % 2, d % 8
    t, i, blocks = token // 4, token % 4, dim // 64
    if bits == 4:
        number = _nibble(some, 2 * ((((w * 8 + g) * 4 + t) * blocks + m) * 4 + i) + h)
        return np.where(number > 7, 7 - (number & 7), 8 + (number & 7))
    q = g % 4
    three = [
        2 * (((((w * 2 + g // 4) * 3 + r) * 4 + t) * blocks + m) * 4 + i) + h for r in range(3)
    ]
    own = [_nibble(some, at) & 7 for at in three]
    fourth = sum((_nibble(some, at) >> 3) << 2 - r for r, at in enumerate(three))
    return np.select([q == r for r in range(3)], own, fourth)


@dataclasses.dataclass
class TurboCase:
    form: TurboFormat
    q: Array  # [B, S, H, D]
    kv_cache: Array  # uint8 [L, N, Hk, C * slot]
    block_tables: Array
    seq_lens: Array
    layer: int
    options: dict[str, Any]  # window, soft_cap, and arrays sinks, gate, query_lens

    @property
    def args(self) -> tuple[Array, Array, Array, Array]:
        return self.q, self.kv_cache, self.block_tables, self.seq_lens


def turbo_case(
    lens: list[int],
    preset: str,
    *,
    group: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    q_len: int = 1,
    page: int = 64,
    dtype: Any = jnp.bfloat16,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    gate: bool = False,
    query_lens: list[int] | None = None,
    layers: int = 2,
    layer: int = 1,
    seed: int = 0,
) -> TurboCase:
    """Random queries, and rows of `lens` tokens of uniformly random codes on shuffled pages.

    All other bytes are 0xFF, which is NaN in float16 and e4m3.
    """
    rng = np.random.default_rng(seed)
    form = TurboFormat(preset=preset, head_dim=dim)
    needed = [-(-n // page) for n in lens]
    count = sum(needed) + 3
    shuffled = iter(rng.permutation(count))
    tables = np.full((len(lens), max(needed) + 2), NO_SUCH_PAGE, np.int32)
    cache = np.full((layers, count, kv_heads, page, form.slot_bytes), 0xFF, np.uint8)
    for row, length in enumerate(lens):
        queries = q_len if query_lens is None else query_lens[row]
        begin = 0 if window is None else max(length - queries - (window - 1), 0)
        for j in range(begin // page, needed[row]):
            tables[row, j] = next(shuffled)
            held = j * page + np.arange(page)
            held = (held >= begin) & (held < length)
            slots = random_slots(form, (kv_heads, page), rng)
            cache[layer, tables[row, j]] = np.where(held[:, None], slots, np.uint8(0xFF))
    heads = group * kv_heads
    options: dict[str, Any] = {"window": window, "soft_cap": soft_cap}
    q = rng.normal(size=(len(lens), q_len, heads, dim))
    if query_lens is not None:
        options["query_lens"] = jnp.asarray(query_lens, jnp.int32)
        q[np.arange(q_len) >= np.asarray(query_lens)[:, None]] = np.nan
    if sinks:
        options["sinks"] = jnp.asarray(2 * rng.normal(size=heads), jnp.float32)
    if gate:
        gates = rng.normal(size=q.shape)
        gates[np.asarray(lens) == 0] = np.nan
        options["gate"] = jnp.asarray(gates.astype(dtype))
    return TurboCase(
        form, jnp.asarray(q.astype(dtype)), slot_pages(form, jnp.asarray(cache)),
        jnp.asarray(tables), jnp.asarray(lens, jnp.int32), layer, options,
    )  # fmt: skip


def random_slots(form: TurboFormat, shape: tuple[int, ...], rng: Any) -> np.ndarray:
    """Slots with random codes, and with norms, scales and minima like those of normal data."""
    slots = rng.integers(0, 256, (*shape, form.slot_bytes)).astype(np.uint8)
    numbers = [rng.uniform(0.1, 0.5, shape), rng.uniform(-3, -1, shape)]
    if form.rotated:
        # The levels of random codes have length 1.6 with 4 bits, and 2.0 with 3, so keys are like
        # normal.
        length = {4: 1.0, 3: 0.8}[form.key_bits]
        numbers.insert(0, length * rng.uniform(0.3, 0.9, shape))
    else:
        keys = rng.normal(size=(*shape, form.head_dim)).astype(ml_dtypes.float8_e4m3fn)
        slots[..., : form.key_bytes] = keys.view(np.uint8)
    halves = np.stack(numbers, axis=-1).astype(np.float16)
    slots[..., -form.meta_bytes :] = halves.view(np.uint8)
    return slots


def launch_turbo_decode(
    q: Array,
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    interpret: bool = False,
    detect_races: bool = False,
    **asked: Any,
) -> tuple[Array, ...]:
    """Launches the kernel for a call with these arguments, without the op's checks."""
    call = TurboDecodeCall(
        q=q, kv_cache=kv_cache, block_tables=block_tables, seq_lens=seq_lens, **asked
    )
    return turbo_decode_mosaic(call, interpret=interpret, detect_races=detect_races)


def turbo_oracle(case: TurboCase) -> tuple[np.ndarray, np.ndarray]:
    """(out [B, S, H, D], lse [B, S, H]) in float64; (0, -inf) if a token sees no key."""
    q, lens, tables = (np.asarray(x) for x in (case.q, case.seq_lens, case.block_tables))
    batch, q_len, heads, dim = q.shape
    kv_heads = case.kv_cache.shape[2]
    page = case.kv_cache.shape[3] // case.form.slot_bytes
    options, group = case.options, heads // kv_heads
    window, cap = options.get("window"), options.get("soft_cap")
    queries = np.asarray(options.get("query_lens", np.full(batch, q_len)))
    turn = np.eye(dim) if case.form.preset == "k8v4" else hadamard64(dim)
    out, lse = np.zeros(q.shape), np.full((batch, q_len, heads), -np.inf)
    layer = np.asarray(case.kv_cache)[case.layer]
    for b, n in np.ndindex(batch, kv_heads):
        owned = tables[b, : -(-lens[b] // page)]
        owned = np.where(owned < len(layer), owned, 0)  # left of a window
        held = [read_page(case.form, layer[number, n]) for number in owned]
        for s in range(min(queries[b], q_len) if held else 0):
            end = lens[b] - queries[b] + s + 1
            if end <= 0:
                continue
            begin = 0 if window is None else max(end - window, 0)
            k, v = (np.concatenate(some)[begin:end] for some in zip(*held, strict=True))
            for h in range(n * group, (n + 1) * group):
                scores = (k @ turn) @ q[b, s, h].astype(np.float64) * dim**-0.5
                if cap is not None:
                    scores = cap * np.tanh(scores / cap)
                every = scores
                if options.get("sinks") is not None:
                    every = np.append(scores, np.float64(options["sinks"][h]))
                top = every.max()
                total = np.exp(every - top).sum()
                out[b, s, h] = np.exp(scores - top) / total @ v
                lse[b, s, h] = top + np.log(total)
    if options.get("gate") is not None:
        gate = np.asarray(options["gate"], np.float64)
        out = np.where(np.isneginf(lse)[..., None], 0, out / (1 + np.exp(-gate)))
    return out, lse


def assert_turbo_close(
    case: TurboCase, out: Array, lse: Array, *, error: float = 4e-3, lse_error: float = 2e-5
) -> None:
    """Asserts that each row is within the relative L2 `error`, and the LSE within `lse_error`."""
    expected, expected_lse = turbo_oracle(case)
    assert out.shape == expected.shape and out.dtype == case.q.dtype
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    np.testing.assert_allclose(np.asarray(lse, np.float64), expected_lse, atol=lse_error, rtol=0)
    dead = np.isneginf(expected_lse)
    assert (np.asarray(out)[dead] == 0).all()
    for row, reference in zip(np.asarray(out)[~dead], expected[~dead], strict=True):
        assert relative(row, reference) < error
