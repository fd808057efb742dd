"""Cases of MLA attention over lists of positions, and their float64 reference in NumPy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.core.cache.formats import LatentFormat
from jaxattn.kernels.mla.decode.arguments import MlaDecodeCall
from jaxattn.kernels.mla.sparse.launch import mla_sparse_mosaic

RANK, ROPE = 512, 64
SCALE = 192**-0.5


@dataclasses.dataclass(frozen=True)
class SparseCase:
    """A call of MLA attention over lists of positions.

    `latents` are the stored latents of each row, float64 [tokens, 576], with NaN where no list has
    a token.
    """

    q: Any
    kv_cache: Any
    block_tables: Any
    seq_lens: Any
    indices: Any
    latents: list[np.ndarray]
    query_lens: Any = None
    sinks: Any = None
    kv_scale: Any = None
    layer: int = 1

    def visible(self) -> np.ndarray:
        """The number of positions that each token may see, [B, S]."""
        lens, tokens = np.asarray(self.seq_lens)[:, None], self.q.shape[1]
        queries = tokens if self.query_lens is None else np.asarray(self.query_lens)[:, None]
        at = np.arange(tokens)
        return np.where((lens > 0) & (at < queries), np.maximum(lens - queries + at + 1, 0), 0)


# Two programs: in one, XLA's GPU compiler would omit the rounding.
_pack = jax.jit(LatentFormat.pack, static_argnums=0)
_unpack = jax.jit(LatentFormat.unpack, static_argnums=0)


def sparse_case(
    lens: list[int],
    *,
    q_len: int = 1,
    heads: int = 64,
    top_k: int = 128,
    cache: str = "bfloat16",
    page: int = 64,
    width: int | None = None,
    holes: float = 0.2,
    ascending: bool = False,
    query_lens: list[int] | None = None,
    sinks: bool = False,
    seed: int = 0,
) -> SparseCase:
    """Random lists of positions for each token, with holes and positions beyond its own.

    The cache is NaN where no list has a token, and so are padding's queries.

    Args:
        holes: The fraction of entries that are negative or too large.
        ascending: Whether lists are ascending, without holes, as long as the token sees positions,
            and then -1.
    """
    rng = np.random.default_rng(seed)
    format = LatentFormat(cache)
    scale = 2.0**-6 if format.per_tensor else None
    batch, tokens = len(lens), max(max(lens), 1)
    needed = [-(-n // page) for n in lens]
    pages = sum(needed) + 3
    shuffled = iter(rng.permutation(pages))
    tables = np.full((batch, width or max(needed) + 1), 2**30, np.int32)
    for row in range(batch):
        for j in range(needed[row]):
            tables[row, j] = next(shuffled)
    dtype = jnp.dtype(jnp.bfloat16) if format.quantized else format.dtype
    q = jnp.asarray(rng.normal(size=(batch, q_len, heads, RANK + ROPE)).astype(dtype))
    empty = SparseCase(q, None, tables, np.array(lens, np.int32), None, [])
    given = None if query_lens is None else jnp.asarray(query_lens, jnp.int32)
    visible = dataclasses.replace(empty, query_lens=given).visible()
    q = jnp.where(visible[..., None, None] > 0, q, jnp.nan)
    indices = np.full((batch, q_len, top_k), -1, np.int32)
    listed = [np.zeros(max(n, 1), bool) for n in lens]
    for b, s in np.ndindex(batch, q_len):
        sees = visible[b, s]
        number = min(sees, top_k)
        if ascending:
            indices[b, s, :number] = np.sort(rng.permutation(sees)[:number])
        elif sees:
            chosen = rng.integers(sees, size=top_k)
            gone = rng.choice([-1, -7, sees, sees + 5, 2**31 - 1], size=top_k)
            indices[b, s] = np.where(rng.random(top_k) < holes, gone, chosen)
        else:
            indices[b, s] = rng.integers(tokens, size=top_k)
        valid = indices[b, s][(indices[b, s] >= 0) & (indices[b, s] < sees)]
        listed[b][valid] = True
    rows = []
    for of_row in (*listed, np.zeros(1, bool)):
        numbers = np.full((len(of_row), RANK + ROPE), np.nan, np.float32)
        numbers[of_row] = rng.normal(size=(of_row.sum(), RANK + ROPE))
        rows.append(numbers)
    packed = _pack(format, np.concatenate(rows), scale)
    unpacked = _unpack(format, packed, scale)
    ends = np.cumsum([len(numbers) for numbers in rows])[:-1]
    *stored, (nothing,) = np.split(np.asarray(packed), ends)
    latents = np.split(np.asarray(unpacked, np.float64), ends)[:-1]
    kv_cache = np.broadcast_to(nothing, (2, pages, page, format.width)).copy()
    for b in range(batch):
        for j in range(needed[b]):
            some = stored[b][j * page : (j + 1) * page]
            kv_cache[1, tables[b, j], : len(some)] = some
    return SparseCase(
        q, jnp.asarray(kv_cache), jnp.asarray(tables), jnp.asarray(lens, jnp.int32),
        jnp.asarray(indices), latents, given,
        jnp.asarray(rng.normal(size=heads) * 2, jnp.float32) if sinks else None, scale,
    )  # fmt: skip


def sparse_reference(case: SparseCase) -> tuple[np.ndarray, np.ndarray]:
    """(out [B, S, H, 512], lse [B, S, H]) in float64."""
    q = np.asarray(case.q, np.float64)
    (batch, tokens, heads, _), visible = q.shape, case.visible()
    out, lse = np.zeros((batch, tokens, heads, RANK)), np.full((batch, tokens, heads), -np.inf)
    for b, s in np.ndindex(batch, tokens):
        some = np.asarray(case.indices)[b, s].astype(np.int64)
        some = some[(some >= 0) & (some < visible[b, s])]
        if not some.size:
            continue
        keys = case.latents[b][some]
        scores = q[b, s] @ keys.T * SCALE
        logits = scores
        if case.sinks is not None:
            logits = np.concatenate([scores, np.asarray(case.sinks, np.float64)[:, None]], 1)
        top = logits.max(1)
        total = np.exp(logits - top[:, None]).sum(1)
        lse[b, s] = top + np.log(total)
        out[b, s] = np.exp(scores - lse[b, s][:, None]) @ keys[:, :RANK]
    return out, lse


def launch_mla_sparse(case: SparseCase, **options: Any) -> tuple[Any, ...]:
    """Launches the kernel for a call, without the op's checks."""
    call = MlaDecodeCall(
        q=case.q, kv_cache=case.kv_cache, block_tables=case.block_tables, seq_lens=case.seq_lens,
        scale=SCALE, query_lens=case.query_lens, layer=case.layer, kv_scale=case.kv_scale,
    )  # fmt: skip

    @jax.jit
    def run(call: MlaDecodeCall, indices: Any, sinks: Any) -> tuple[Any, ...]:
        return mla_sparse_mosaic(call, indices, sinks, **options)

    return run(call, case.indices, case.sinks)


def assert_sparse_close(case: SparseCase, found: tuple[Any, ...]) -> tuple[float, float]:
    """(relative L2 error, largest LSE difference); exact for tokens that attend to nothing."""
    out, lse = (np.asarray(x, np.float64) for x in found[:2])
    wanted, wanted_lse = sparse_reference(case)
    nothing = np.isneginf(wanted_lse)
    np.testing.assert_array_equal(np.isneginf(lse), nothing)
    assert (out[nothing] == 0).all(), "a token that attends to nothing is not 0"
    error = np.linalg.norm(out - wanted) / max(np.linalg.norm(wanted), 1e-30)
    lse, wanted_lse = (np.where(nothing, 0, x) for x in (lse, wanted_lse))
    lse_error = np.abs(lse - wanted_lse).max()
    assert error < 5e-3 and lse_error < 1e-2, (error, lse_error)
    return float(error), float(lse_error)
