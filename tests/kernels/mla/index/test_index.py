"""The indexer's kernels against float64: of whole numbers, so that ties are exact and all equal."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.mla.index import top_k, work_tiles
from jaxattn.kernels.mla.index.launch import mla_index_mosaic, refuse_index
from jaxattn.kernels.mla.index.work_tiles import IndexTiling
from tests.helpers.kernel_cases import NO_SUCH_PAGE, behind, no_races

FP8 = "float8_e4m3fn"
DIM = 128


@dataclasses.dataclass
class IndexCase:
    """Whole numbers on shuffled pages; what no row owns is NaN, and tables end in no page."""

    lens: list[int]
    q_len: int
    heads: int
    page: int
    dtype: str = "bfloat16"
    keys: str | None = None
    queries: list[int] | None = None
    equal: bool = False  # whether all keys are
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        needed = [-(-n // self.page) for n in self.lens]
        shuffled = iter(rng.permutation(sum(needed) + 3))
        stored = np.dtype(self.keys or self.dtype)
        shape = (2, sum(needed) + 3, self.page)
        self.cache = np.full((*shape, DIM), np.nan, stored)
        self.scale = np.full(shape, np.nan, np.float32) if self.keys else None
        self.tables = np.full((len(self.lens), max(needed) + 2), NO_SUCH_PAGE, np.int32)
        self.held = []  # each row's keys
        for row, length in enumerate(self.lens):
            keys = rng.integers(-2, 3, (length, DIM)) * (0 if self.equal else 1)
            scale = 2.0 ** rng.integers(-2, 3, length)
            for j in range(needed[row]):
                page = self.tables[row, j] = next(shuffled)
                some = slice(j * self.page, min((j + 1) * self.page, length))
                self.cache[1, page, : some.stop - some.start] = keys[some].astype(stored)
                if self.scale is not None:
                    self.scale[1, page, : some.stop - some.start] = scale[some]
            self.held.append(keys * scale[:, None] if self.keys else keys)
        size = len(self.lens), self.q_len, self.heads
        self.q = rng.integers(-1, 2, (*size, DIM)).astype(np.dtype(self.dtype))
        self.weights = rng.integers(-1, 3, size).astype(np.float32)

    def run(self, count: int, *, interpret: bool = False) -> np.ndarray:
        def index(q, weights, cache, tables, lens, queries, scale):
            return mla_index_mosaic(
                q, weights, cache, tables, lens, top_k=count, query_lens=queries, layer=1,
                k_scale=scale, interpret=interpret,
            )  # fmt: skip

        lens = np.array(self.lens, np.int32)
        queries = None if self.queries is None else np.array(self.queries, np.int32)
        return np.asarray(
            jax.jit(index)(self.q, self.weights, self.cache, self.tables, lens, queries, self.scale)
        )

    def expected(self, row: int, token: int, count: int) -> np.ndarray:
        new = self.q_len if self.queries is None else self.queries[row]
        length = self.lens[row]
        seen = min(max(length - new + token + 1, 0), length) if token < new else 0
        products = self.held[row][:seen] @ self.q[row, token].astype(np.float64).T
        scores = np.maximum(products, 0) @ self.weights[row, token].astype(np.float64)
        places = np.sort(np.argsort(-scores, kind="stable")[:count])
        return np.pad(places, (0, count - len(places)), constant_values=-1)

    def check(self, out: np.ndarray, tokens: list[int] | None = None) -> None:
        for row in range(len(self.lens)):
            for token in range(self.q_len) if tokens is None else tokens:
                expected = self.expected(row, token, out.shape[-1])
                np.testing.assert_array_equal(out[row, token], expected, f"row {row}, {token=}")


def test_rows_of_several_groups_have_the_best_of_what_each_token_sees(monkeypatch):
    """In the interpreter: a padding row and token, a row shorter than the top k, ties."""
    monkeypatch.setattr(work_tiles, "SCRATCH_BYTES", 3 * 2 * 384 * 4)
    case = IndexCase([200, 0, 70], 3, 8, 64, queries=[3, 0, 2])
    monkeypatch.setattr(work_tiles, "MOST_TOKENS", 2)
    with no_races():
        case.check(case.run(128, interpret=True))


def test_fp8_keys_have_scales_of_their_own():
    case = IndexCase([150], 1, 8, 128, keys=FP8)
    with no_races():
        case.check(case.run(128, interpret=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "count", "tokens"),
    [
        (partial(IndexCase, [5000, 0, 3000, 40], 2, 64, 64), 512, None),
        (partial(IndexCase, [9000, 2500, 1500], 3, 32, 16, "float16", None, [3, 1, 0]), 1024, None),
        (partial(IndexCase, [131072, 70, 0, 2100], 1, 64, 64), 2048, None),
        (partial(IndexCase, [40000, 2049, 2048], 8, 32, 128), 2048, [0, 3, 7]),
        (partial(IndexCase, [4300, 300], 300, 64, 32), 1024, [0, 1, 150, 299]),
        (partial(IndexCase, [9000, 4100], 4, 64, 64, keys=FP8), 512, None),
        (partial(IndexCase, [33000] + [2100] * 9, 1, 64, 128, keys=FP8), 2048, None),
        (partial(IndexCase, [32768, 20001], 2, 8, 64, equal=True), 2048, None),
        (partial(IndexCase, [12288] * 30, 1, 64, 64), 512, [0]),
        (partial(IndexCase, [50000], 70, 64, 64), 2048, [0, 69]),
    ],
    ids=["short", "ragged", "long", "tokens", "chunk", "fp8", "fp8-rows", "equal"]
    + ["three-blocks", "in-turns"],  # of the top k: a cluster of three; a row read more than once
)
def test_compiled_kernels_take_the_first_of_equal_scores(case, count, tokens):
    some = case()
    some.check(some.run(count), tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [None, FP8])
def test_a_row_has_the_places_that_it_has_by_itself(keys):
    """Of scores that differ by rounding, in clusters of three blocks."""
    case = IndexCase([12288] * 30, 1, 64, 64, keys=keys)
    rng = np.random.default_rng(1)
    case.q = rng.normal(size=case.q.shape).astype(case.q.dtype)
    case.weights = rng.normal(size=case.weights.shape).astype(np.float32)
    case.cache = rng.normal(size=case.cache.shape).astype(case.cache.dtype)
    together = case.run(512)
    for row in (0, 13, 29):
        some = slice(row, row + 1)
        own = dataclasses.replace(case, lens=case.lens[some])
        for name in ("q", "weights", "tables", "cache", "scale"):
            held = getattr(case, name)
            setattr(own, name, held if name in ("cache", "scale") else held[some])
        np.testing.assert_array_equal(own.run(512)[0], together[row])


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("keys", [None, FP8])
def test_keys_behind_two_to_the_31_numbers_are_read(keys):
    case = IndexCase([3000, 0, 70], 2, 64, 64, keys=keys)
    tables = case.tables
    case.cache, case.tables = behind(2**31, case.cache, tables)
    if case.scale is not None:
        case.scale, _ = behind(2**31 // DIM, case.scale, tables)
    case.check(case.run(512))


@pytest.mark.gpu
def test_compiled_groups_of_a_chunk_are_the_chunk(monkeypatch):
    monkeypatch.setattr(work_tiles, "SCRATCH_BYTES", 2**20)
    case = IndexCase([4300, 300], 64, 64, 64)
    case.check(case.run(512), [0, 1, 31, 63])


@pytest.mark.parametrize(
    ("q", "cache", "count", "reason"),
    [
        (("bfloat16", 64, 128), ("float16", 64, 128), 512, "index_cache float16"),
        (("float32", 64, 128), ("float32", 64, 128), 512, "q float32"),
        (("bfloat16", 64, 64), ("bfloat16", 64, 64), 512, "keys of 128 dims"),
        (("bfloat16", 12, 128), ("bfloat16", 64, 128), 512, "has 12"),
        (("bfloat16", 64, 128), ("bfloat16", 48, 128), 512, "has 48"),
        (("bfloat16", 64, 128), (FP8, 32, 128), 512, "pages of 64, 128"),
        (("bfloat16", 64, 128), ("bfloat16", 64, 128), 100, "got 100"),
        (("bfloat16", 64, 128), ("bfloat16", 128, 128), 512, "reach 67,108,992"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name(q, cache, count, reason):
    (dtype, heads, dim), (stored, page, width) = q, cache
    queries = jax.ShapeDtypeStruct((2, 1, heads, dim), dtype)
    pages = jax.ShapeDtypeStruct((9, page, width), stored)
    tables = jax.ShapeDtypeStruct((2, 2**26 // 128 + 1), np.int32)
    with pytest.raises(Refusal, match=reason):
        refuse_index(queries, pages, tables, count)


@pytest.mark.parametrize("sizes", [(1, 8192, 64, 2**17), (128, 8, 64, 10**6), (3, 5, 128, 48)])
def test_scores_take_no_more_memory_than_is_stated(sizes):
    tiling = IndexTiling.of(*sizes)
    batch, q_len, heads, most_keys = sizes
    assert tiling.group * tiling.tokens * tiling.width * 4 <= work_tiles.SCRATCH_BYTES
    assert tiling.group * tiling.groups >= tiling.items
    assert tiling.row_items * tiling.tokens >= q_len and tiling.width >= most_keys
    assert tiling.columns <= work_tiles.MOST_COLUMNS and tiling.items >= batch


def test_a_row_that_is_longer_than_its_table_has_no_keys_and_no_more_has_padding():
    lens = np.array([64, 65, 2**31 - 1, 1, 0, -5, -(2**31)], np.int32)[:, None]
    seen = work_tiles.visible_keys(lens, np.int32(2), np.arange(3, dtype=np.int32), 64)
    assert np.asarray(seen).tolist() == [[63, 64, 0], *[[0] * 3] * 2, [0, 1, 0], *[[0] * 3] * 3]


def test_parts_have_equally_many_tiles_and_meet():
    visible = np.array([[0, 0], [699, 700], [512, 511], [3000, 0], [513, 513]], np.int32)
    first, before, total = np.asarray(
        jax.jit(work_tiles.part_begins, static_argnums=(1, 2))(visible, 512, 7)
    )
    tiles = np.array([0, 11, 0, 47, 9])
    assert (total == 67).all()
    begins = [i * 9 + min(i, 4) for i in range(8)]
    for part, begin in enumerate(begins[:7]):
        assert before[part] == tiles[: first[part]].sum() <= begin < tiles[: first[part] + 1].sum()
    assert first[7] == 4


def test_a_cluster_has_as_many_blocks_as_the_gpu_has_for_a_row():
    rows = {1: 8, 28: 4, 32: 3, 64: 2, 65: 1}
    assert {some: top_k.cluster_size(some, 131072) for some in rows} == rows
    assert top_k.cluster_size(1, 4096) == 1
