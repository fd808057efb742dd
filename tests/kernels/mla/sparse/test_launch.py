"""The kernel of MLA attention over lists of positions against float64, in the interpreter with race
detection and on a Hopper GPU. Whatever no list has is NaN."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.mla.decode.arguments import MlaDecodeCall
from jaxattn.kernels.mla.decode.warp_specialized import fp8_dequantization
from jaxattn.kernels.mla.sparse.launch import _splits, mla_sparse_mosaic, scratch
from tests.helpers.kernel_cases import behind, both_devices, no_races, slow
from tests.helpers.mla_sparse_cases import (
    SCALE,
    assert_sparse_close,
    launch_mla_sparse,
    sparse_case,
)

# Tokens, pages of their lists, blocks and whether the cut is batch invariant: the second is CUT's.
CUTS = [(1, 32, 16, False), (2, 7, 4, True), (256, 32, 66, False), (100, 32, 66, True)]
FEW = {"lens": [70, 0], "top_k": 128}
CUT = {"lens": [300, 0], "top_k": 448, "sinks": True}
RAGGED = {
    "lens": [70, 150], "top_k": 70, "q_len": 2, "heads": 16, "page": 16, "cache": "uint8",
    "query_lens": [1, 2], "sinks": True,
}  # fmt: skip
SHORT = {"lens": [130], "q_len": 70, "top_k": 64, "ascending": True, "cache": "float16"}
MANY = {"lens": [90] * 6, "top_k": 64, "heads": 128, "page": 128, "cache": "float8_e4m3fn"}


def attend(case, implementation, **options):
    if implementation == "mosaic_gpu":
        return launch_mla_sparse(case, **options)
    with no_races():
        found = launch_mla_sparse(case, interpret=True, **options)
        return jax.block_until_ready(found)


@pytest.mark.slow_cases(
    reason="what is skipped, whole rows and their order: a padding row, a chunk of more than 64 "
    "tokens, more tokens than blocks, a cut; found by the tests of mla_decode, whose body this is, "
    "too"
)
@both_devices
@pytest.mark.parametrize(
    "given",
    [
        pytest.param(CUT, id="cut_with_sinks", marks=pytest.mark.slow),
        pytest.param(RAGGED, id="block_scaled_ragged_with_sinks"),
        slow(FEW),
        slow(SHORT),
        slow(MANY),
    ],
)
def test_a_token_attends_to_its_list_alone(given, implementation):
    case = sparse_case(**given)
    assert_sparse_close(case, attend(case, implementation, batch_invariant=given is CUT))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("cache", ["bfloat16", "uint8"])
def test_a_long_row_among_short_ones_behind_two_to_the_31_numbers(cache):
    case = sparse_case([131072, 3, 0, 700], q_len=2, heads=128, top_k=2048, cache=cache)
    moved = behind(2**31, case.kv_cache, np.asarray(case.block_tables))
    case = dataclasses.replace(case, kv_cache=moved[0], block_tables=moved[1])
    assert_sparse_close(case, launch_mla_sparse(case))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["bfloat16", "uint8"])
def test_an_equal_token_has_equal_bits_in_another_place(cache):
    case = sparse_case([3000, 2000, 0], heads=128, top_k=1024, cache=cache)
    turned = dataclasses.replace(
        case, q=case.q[::-1], block_tables=case.block_tables[::-1], seq_lens=case.seq_lens[::-1],
        indices=case.indices[::-1],
    )  # fmt: skip
    found = launch_mla_sparse(case, batch_invariant=True)
    for one, other in zip(found, launch_mla_sparse(turned, batch_invariant=True), strict=True):
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (one, other[::-1])))


def shapes(cache=(2, 4, 64, 576), dtype="bfloat16", q="bfloat16", dim=576, **given):
    struct = jax.ShapeDtypeStruct
    return MlaDecodeCall(
        q=struct((1, 1, 64, dim), q), kv_cache=struct(cache, dtype),
        block_tables=struct((1, 4), jnp.int32), seq_lens=struct((1,), jnp.int32), scale=SCALE,
        **given,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (shapes(dim=512), "qk_rope_head_dim 64"),
        (shapes(cache=(2, 4, 64, 640)), "576 numbers per token"),
        (shapes(dtype="float32", q="float32"), "both bfloat16 or both float16"),
        (shapes(dtype="uint8", cache=(2, 4, 64, 656), q="float16"), "with an FP8 cache"),
        (shapes(cache=(2, 4, 48, 576)), "pages of 16, 32, 64 or 128"),
        (shapes(cache=(64, 2**19, 64, 576)), "2,147,483,648"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(call, said):
    indices = jax.ShapeDtypeStruct((1, 1, 64), jnp.int32)
    with pytest.raises(Refusal, match=said):
        mla_sparse_mosaic(call, indices, interpret=True)


def test_a_warp_widens_the_rope_numbers_that_it_copied(monkeypatch):
    """Its copies of a block-scaled page are all that it has waited for; on NumPy, for all threads
    at once."""
    index, copied = np.arange(128), []
    plain = {
        "WarpgroupThread": lambda: SimpleNamespace(index=index, warp=index // 32),
        "arith": SimpleNamespace(andi=np.bitwise_and),
        "word": int,
        "plus": lambda *words: sum(words),
        "times": lambda x, by: x * by,
        "load": lambda ref, at, fixed, words: [at + fixed + 4 * i for i in range(words)],
        "joined": np.stack,
        "store": lambda value, ref, at, fixed: copied.append((value[0], at + fixed)),
    }
    for name, value in plain.items():
        monkeypatch.setattr(fp8_dequantization, name, value)
    fp8_dequantization._copied(None, None)
    read, written = (np.stack(places) for places in zip(*copied, strict=True))
    np.testing.assert_array_equal(read, written)
    np.testing.assert_array_equal(np.sort(read.ravel()), np.arange(0, 64 * 128, 16))
    assert (read // (16 * 128) == index // 32).all()


def test_a_list_is_cut_where_tokens_are_fewer_than_blocks():
    cut = [_splits(rows, pages, parts, invariant) for rows, pages, parts, invariant in CUTS]
    assert cut == [True, True, False, False]


def test_few_tokens_have_room_for_partial_results_and_a_chunk_has_none():
    few = scratch(batch=1, q_len=1, num_heads=128, top_k=2048)
    assert "partial_out" in dict(few.regions)
    many = scratch(batch=1, q_len=4096, num_heads=128, top_k=2048)
    assert set(dict(many.regions)) == {"out"}
