"""`gqa_cache_write`: new tokens go to their own places, and to no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gqa
from jaxattn.core.cache.formats import FP8, FP8_BITS
from jaxattn.core.layer_index import LayerIndex
from tests.helpers.draws import normal

PAGE, PAGES, KV_HEADS, DIM = 4, 9, 2, 3
TABLES = np.array([[7, 1, 3], [0, 5, 2], [-1, 99, 2**30], [6, 6, 6]], np.int32)


def dirty(dtype="float32"):
    return jnp.full((2, PAGES, 2, PAGE, KV_HEADS, DIM), 0.25, dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layer", ["int", "traced", "LayerIndex"])
def test_each_token_is_written_to_its_place_and_nothing_else_is(dtype, layer):
    k, v = normal(4, 5, KV_HEADS, DIM), normal(4, 5, KV_HEADS, DIM, seed=2)
    lens, new = np.array([9, 5, 0, 2], np.int32), np.array([5, 2, 5, 3], np.int32)
    expected = np.array(dirty(dtype))
    for b, t in np.ndindex(4, 5):
        position = lens[b] - new[b] + t
        if lens[b] > 0 and t < new[b] and position >= 0:
            place = 1, TABLES[b, position // PAGE], slice(None), position % PAGE
            expected[place] = np.stack([k[b, t], v[b, t]]).astype(expected.dtype)

    def write(number):
        of = LayerIndex(number, 1, 0) if layer == "LayerIndex" else number
        given = dict(query_lens=new, layer=of)
        return gqa.gqa_cache_write(dirty(dtype), k, v, TABLES, lens, **given)

    found = write(1) if layer == "int" else jax.jit(write)(1)
    np.testing.assert_array_equal(np.asarray(found), expected)
    plain = gqa.gqa_cache_write(dirty(dtype)[1], k, v, TABLES, lens, query_lens=new)
    np.testing.assert_array_equal(np.asarray(plain), expected[1])


@pytest.mark.parametrize("length", [-3, 3 * PAGE + 1, -(2**31), 2**31 - 1])
def test_a_traced_row_that_does_not_fit_writes_nothing(length):
    k = normal(1, 2, KV_HEADS, DIM)
    write = jax.jit(lambda lens, table: gqa.gqa_cache_write(dirty(), k, k, table, lens, layer=1))
    np.testing.assert_array_equal(write(np.array([length], np.int32), TABLES[:1]), dirty())
    for page in (-1, PAGES, 2**31 - 1):  # and a page that there is not
        table = np.full((1, 3), page, np.int32)
        np.testing.assert_array_equal(write(np.array([6], np.int32), table), dirty())


def test_the_write_is_in_place_where_the_cache_is_donated():
    k = jax.ShapeDtypeStruct((2, 1, KV_HEADS, DIM), jnp.float32)
    lens, tables = np.array([9, 5], np.int32), jnp.asarray(TABLES[:2])

    def write(cache, k):
        return gqa.gqa_cache_write(cache, k, k, tables, lens, layer=1)

    compiled = jax.jit(write, donate_argnums=0).lower(dirty(), k).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == dirty().nbytes
    assert memory.temp_size_in_bytes < dirty().nbytes / 4


def test_the_bits_of_an_fp8_cache_are_written_in_place_and_read_as_its_numbers():
    """XLA for a CPU widens all of an FP8 cache around a write, and none of the bits."""
    scale = jnp.asarray([[0.5, 2.0], [0.01, 300.0]])
    lens, new = np.array([9, 5, 0, 6], np.int32), np.array([5, 2, 5, 1], np.int32)
    k, v = (normal(4, 5, KV_HEADS, DIM, seed=seed) * 100 for seed in (1, 2))
    k[0, 0], v[0, 1] = np.inf, np.nan
    tables = np.where(TABLES == 6, [8, 6, 4], TABLES)
    q = normal(4, 1, 2 * KV_HEADS, DIM, seed=3)

    def write(cache):
        return gqa.gqa_cache_write(
            cache, k, v, tables, lens, query_lens=new, layer=1, kv_scale=scale
        )

    def read(cache, tables):
        options = dict(scale=0.3, layer=1, kv_scale=scale, implementation="xla")
        decoded = gqa.gqa_decode(q, cache, tables, lens, **options)
        return decoded, gqa.gqa_prefill(
            q, k[:, :1], v[:, :1], cache, tables, lens, query_lens=lens * 0 + 1, **options
        )

    numbers = dirty(FP8)
    bits = jax.lax.bitcast_convert_type(numbers, FP8_BITS)
    compiled = jax.jit(write, donate_argnums=0).lower(bits).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < bits.nbytes
    numbers, bits = jax.jit(write)(numbers), compiled(bits)
    assert np.asarray(numbers).tobytes() == np.asarray(bits).tobytes()
    tables[3, 1] = PAGES + 3  # reads as NaN
    found, wanted = (jax.jit(read)(cache, tables) for cache in (bits, numbers))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.isnan(np.asarray(jax.tree.leaves(found)[0][3])).any()


def test_two_tokens_for_one_place_are_refused():
    k = normal(2, 1, KV_HEADS, DIM)
    tables = np.array([[7, 1, 3], [0, 1, 2]], np.int32)
    with pytest.raises(ValueError, match="gqa_cache_write: row 0 writes its token 5 to page 1"):
        gqa.gqa_cache_write(dirty(), k, k, tables, [6, 6], layer=1)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(v=normal(1, 1, KV_HEADS, DIM + 1)), ValueError, r"v \[B, S, Hk, D\] has shape"),
        (dict(k=np.zeros((1, 1, KV_HEADS, DIM), int)), TypeError, "k must be bfloat16 or"),
        (dict(kv_cache=jnp.zeros((2, PAGES, PAGE, DIM))), ValueError, "kv_cache .* needs 6 axes"),
        (dict(kv_cache=dirty()[0]), ValueError, r"give the stack \[L, N, 2, C, Hk, D\]"),
        (dict(seq_lens=[13]), ValueError, "seq_lens .* holds 13"),
    ],
)
def test_what_does_not_fit_is_named(change, error, message):
    k = normal(1, 1, KV_HEADS, DIM)
    given = dict(kv_cache=dirty(), k=k, v=k, block_tables=TABLES[:1], seq_lens=[3], layer=1)
    with pytest.raises(error, match=f"gqa_cache_write: .*{message}|gqa_cache_write: {message}"):
        gqa.gqa_cache_write(**{**given, **change})


@pytest.mark.parametrize("op", ["gqa_decode", "gqa_prefill", "gqa_cache_write"])
@pytest.mark.parametrize(
    "dtype, scale, error, message",
    [
        (FP8, None, ValueError, r"float8_e4m3fn needs kv_scale=.* \[2, Hk = 2\]"),
        (
            FP8,
            jnp.ones((2, 3)),
            TypeError,
            r"kv_scale must be .* \[2, Hk = 2\], got float32 \(2, 3\)",
        ),
        (FP8, jnp.ones((1, 2)), TypeError, r"got float32 \(1, 2\)"),
        (FP8, jnp.ones(2, jnp.bfloat16), TypeError, r"got bfloat16 \(2,\)"),
        (FP8, True, TypeError, "got bool"),
        (FP8, 0.0, ValueError, "kv_scale must be positive and finite, got 0.0"),
        (FP8, 1e39, ValueError, r"positive and finite, got 1e\+39; positive float32 numbers range"),
        (FP8, 1e-60, ValueError, "positive and finite, got 1e-60"),
        (FP8, 10**400, ValueError, "positive and finite, got 1000000000"),
        (FP8, np.float16(0), ValueError, "positive and finite, got 0.0"),
        (FP8, np.float16(np.inf), ValueError, "positive and finite, got inf"),
        (FP8, np.float32([1, 1e-39]), ValueError, r"kv_scale \(2,\) holds .*e-39, but each number"),
        (FP8, np.float32([1, -1]), ValueError, r"kv_scale \(2,\) holds -1.0, but each number"),
        (FP8, jnp.array([[1, 2], [3, np.nan]]), ValueError, r"kv_scale \(2, 2\) holds nan"),
        (jnp.bfloat16, 1.0, ValueError, "bfloat16 is not; drop kv_scale"),
    ],
    ids=str,
)
def test_scales_that_are_missing_or_do_not_fit_are_named(op, dtype, scale, error, message):
    cache, new = dirty(dtype), normal(1, 1, KV_HEADS, DIM).astype(jnp.bfloat16)
    addressing = TABLES[:1], [3]
    given = {
        "gqa_decode": (new, cache, *addressing),
        "gqa_prefill": (new, new, new, cache, *addressing, [1]),
        "gqa_cache_write": (cache, new, new, *addressing),
    }[op]
    with pytest.raises(error, match=f"{op}: .*{message}"):
        getattr(gqa, op)(*given, layer=1, kv_scale=scale)
