"""Page tables and lengths that cannot be: refused where they are known, marked where traced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn import mla
from jaxattn.core.numerics.rope import RopeConfig, rotation
from jaxattn.nn import MultiHeadLatentAttention
from tests.helpers.draws import normal
from tests.helpers.kernel_cases import both_devices

# Two rows of 5 and 9 tokens in pages of 4, of a cache of 6 pages.
TABLES = np.array([[1, 3, -1], [0, 2, 5]], np.int32)
LENS = np.array([5, 9], np.int32)
CACHE = normal(6, 4, 12, seed=5)
CONFIG = RopeConfig(dim=4)
HEADS, RANK, NOPE = 2, 8, 6


def run_decode(tables, lens, *, new=1, query_lens=None, **kwargs):
    q = normal(2, new, HEADS, 12)
    kwargs = dict(scale=0.3, kv_lora_rank=RANK) | kwargs
    return mla.mla_decode(q, CACHE, tables, lens, query_lens=query_lens, **kwargs)


def run_prefill(tables, lens, *, new=2, query_lens=None, **kwargs):
    q, latent = normal(2, new, HEADS, NOPE + 4), normal(2, new, 12, seed=2)
    weights = normal(HEADS, NOPE, RANK, seed=3), normal(HEADS, RANK, 5, seed=4)
    lengths = np.full(2, new, np.int32) if query_lens is None else query_lens
    return mla.mla_prefill(q, latent, *weights, CACHE, tables, lens, lengths, scale=0.3, **kwargs)


def run_write(tables, lens, *, new=1, query_lens=None):
    return mla.mla_cache_write(CACHE, normal(2, new, 12), tables, lens, query_lens=query_lens)


def run_append(tables, lens, *, new=1, query_lens=None, **kwargs):
    angles = rotation(jnp.zeros((2, new), jnp.int32), CONFIG)
    kwargs = dict(rotation=angles, config=CONFIG, query_lens=query_lens) | kwargs
    weights = mla.pack_mla_weights(np.ones(RANK, np.float32), rope_dim=4)
    return mla.mla_append(normal(2, new, 12), None, weights, CACHE, tables, lens, **kwargs)[1]


OPS = {
    "mla_decode": run_decode,
    "mla_prefill": run_prefill,
    "mla_cache_write": run_write,
    "mla_append": run_append,
}
every_op = pytest.mark.parametrize("op", OPS)
writers = pytest.mark.parametrize("op", ["mla_cache_write", "mla_append"])


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


# What is known


@every_op
@pytest.mark.parametrize(
    "number, at, words",
    [
        (-1, (0, 1), r"holds page -1 at \[0, 1\], within row 0's 5 tokens in pages of 4"),
        (6, (1, 0), r"holds page 6 at \[1, 0\], within row 1's 9 tokens .* has pages 0 to 5"),
    ],
)
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, np.ndarray.tolist])
def test_a_page_that_is_not_there(op, number, at, words, kind):
    tables = kind(changed(TABLES, at, number))
    with pytest.raises(ValueError, match=rf"{op}: block_tables \(2, 3\) {words}"):
        OPS[op](tables, LENS)

    @jax.jit
    def step():
        return OPS[op](tables, LENS)

    if kind is not jnp.asarray:  # known while a step is traced, too
        with pytest.raises(ValueError, match=f"{op}: block_tables"):
            step()


@every_op
def test_pages_past_a_rows_length_may_be_anything(op):
    for number in (-1, 6, 2**31 - 1, -(2**31)):
        OPS[op](changed(TABLES, (0, 2), number), LENS)
        OPS[op](changed(TABLES, 0, number), changed(LENS, 0, 0))


@every_op
@pytest.mark.parametrize("length", [-1, -(2**31), 13])
def test_a_length_that_no_row_has(op, length):
    words = (
        "lengths must be at least 0" if length < 0 else r"block_tables \(2, 3\) with pages .* reach"
    )
    with pytest.raises(ValueError, match=rf"{op}: seq_lens \(2,\) holds {length}, but {words}"):
        OPS[op](TABLES, changed(LENS, 0, length))
    with pytest.raises(ValueError, match=rf"{op}: query_lens \(2,\) holds {length}, but "):
        OPS[op](TABLES, LENS, query_lens=np.array([1, length], np.int32))


@writers
@pytest.mark.parametrize(
    "tables, lens, new, words",
    [
        # Both last tokens at place 1 of page 3.
        ([[1, 3, 0], [0, 2, 3]], [6, 10], 1, "row 0 writes its token 5 to page 3, place 1, where"),
        # Row 0 writes place 0 of page 3, which row 1 has and does not write.
        ([[1, 3, 0], [0, 2, 3]], [5, 10], 1, "page 3, place 0, where row 1 has its token 8; rows"),
        # One row, the same page twice.
        ([[1, 1, 0], [0, 2, 5]], [8, 9], 3, "row 0 writes its token 5 to page 1, place 1, where r"),
    ],
)
def test_two_tokens_in_one_place(op, tables, lens, new, words):
    tables, lens = np.int32(tables), np.int32(lens)
    with pytest.raises(ValueError, match=f"{op}: .*{words}"):
        OPS[op](tables, lens, new=new)
    jax.jit(functools.partial(OPS[op], new=new))(tables, lens)  # traced, nothing is known
    assert np.isfinite(run_decode(tables, lens)[0]).all()  # which writes nothing


@writers
def test_pages_that_are_only_read_are_shared_and_places_that_differ(op):
    shared = np.int32([[1, 3, -1], [1, 2, 5]])
    OPS[op](shared, LENS)
    # Places 0 and 1 of page 3, neither within the other row's length.
    OPS[op](np.int32([[1, 3, -1], [3, 2, 5]]), np.int32([5, 0]))
    # A row that writes nothing, and a padding row.
    OPS[op](np.int32([[1, 3, -1], [1, 3, 5]]), np.int32([5, 5]), query_lens=np.int32([0, 0]))
    OPS[op](np.int32([[1, 3, -1], [1, 3, 5]]), np.int32([5, 0]))


def test_the_check_of_places_finds_what_a_walk_over_tokens_finds():
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        tables = rng.integers(0, 6, (2, 3)).astype(np.int32)
        lens = rng.integers(0, 13, 2).astype(np.int32)
        new = rng.integers(0, 4, 2).astype(np.int32)
        holds, clash = {}, False
        for row, length in enumerate(lens):
            for token in range(length):
                place = (tables[row, token // 4], token % 4)
                holds.setdefault(place, []).append(token >= length - new[row])
        clash = any(len(tokens) > 1 and any(tokens) for tokens in holds.values())
        try:
            run_write(tables, lens, new=3, query_lens=new)
        except ValueError as error:
            assert clash, error
            refused += 1
        else:
            assert not clash
    assert 50 < refused < 250


# What is traced

GARBAGE = [13, 2**31 - 1, -1, -(2**31)]


def marked(out, lse, row):
    assert not np.asarray(out[row]).any() and np.isneginf(np.asarray(lse)[row]).all()
    assert np.asarray(out[1 - row]).any() and np.isfinite(np.asarray(lse)[1 - row]).all()


@pytest.mark.parametrize("length", GARBAGE)
@pytest.mark.parametrize("op", ["mla_decode", "mla_prefill"])
def test_a_traced_length_beyond_the_table_gives_no_numbers(op, length):
    step = jax.jit(functools.partial(OPS[op], new=2, implementation="xla"))
    for row in (0, 1):
        out, lse = step(changed(TABLES, (0, 2), 4), changed(LENS, row, length))
        marked(out, lse, row)
        wanted = OPS[op](TABLES, LENS, new=2, implementation="xla")
        np.testing.assert_array_equal(out[1 - row], wanted[0][1 - row])
    # To its last token a table is used.
    out, lse = step(changed(TABLES, (0, 2), 4), np.int32([12, 12]))
    assert np.isfinite(lse).all()


@writers
@pytest.mark.parametrize("length", GARBAGE)
def test_a_traced_length_beyond_the_table_writes_nothing(op, length):
    step = jax.jit(functools.partial(OPS[op], new=2))
    out = np.asarray(step(changed(TABLES, (0, 2), 4), changed(LENS, 0, length)))
    written = (out != CACHE).any(axis=-1)
    assert np.argwhere(written).tolist() == [[2, 3], [5, 0]]  # row 1's


@every_op
def test_traced_query_lens_beyond_the_tokens_are_none(op):
    step = jax.jit(lambda new: OPS[op](TABLES, LENS, new=2, query_lens=new))
    for garbage in (3, -1):
        outs = jax.tree.leaves(step(np.int32([garbage, 2])))
        none = jax.tree.leaves(step(np.int32([0, 2])))
        jax.tree.map(np.testing.assert_array_equal, outs, none)


def test_causal_attention_of_a_traced_length_beyond_its_tokens():
    x = normal(2, 5, HEADS, 8)
    step = jax.jit(lambda lengths: mla.causal_attention(x, x, x, scale=0.3, lengths=lengths))
    for garbage in (6, 2**31 - 1, -1):
        marked(*step(np.int32([garbage, 5])), 0)
    with pytest.raises(
        ValueError, match=r"lengths \(2,\) holds -1, but lengths must be at least 0"
    ):
        mla.causal_attention(x, x, x, scale=0.3, lengths=np.int32([-1, 5]))


@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_a_module_gives_nan_for_it(call):
    """It returns no LSE that would mark the row, and 0 is a finite, wrong number there."""
    sizes = dict(kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=4, v_head_dim=5)
    module = MultiHeadLatentAttention(16, HEADS, dtype=jnp.float32, rngs=nnx.Rngs(0), **sizes)
    x, tables = normal(2, 2, 16), changed(TABLES, (0, 2), 4)
    given = dict(query_lens=np.int32([2, 2])) if call == "prefill" else {}

    @jax.jit
    def step(tables, lens):
        return getattr(module, call)(x, CACHE, block_tables=tables, seq_lens=lens, **given)[:2]

    y, cache = step(tables, np.int32([13, 9]))
    wanted, _ = step(tables, np.int32([0, 9]))
    assert np.isnan(y[0]).all() and not np.asarray(wanted[0]).any()
    np.testing.assert_array_equal(y[1], wanted[1])
    assert not (np.asarray(cache) != CACHE)[[1, 3, 4]].any()

    @jax.jit  # a row without new tokens is padding, whatever its length
    def ragged(new, lens):
        given = dict(block_tables=tables, seq_lens=lens, query_lens=new)
        return getattr(module, call)(x, CACHE, **given)[0]

    y = ragged(np.int32([0, 1]), np.int32([13, 13]))
    assert not np.asarray(y[0]).any() and not np.asarray(y[1, 1]).any()
    assert np.isnan(y[1, 0]).all()


@both_devices
def test_the_kernels_treat_it_as_padding(implementation):
    """With a schedule of the same lengths and without, as columns and as rows."""
    rng = np.random.default_rng(0)
    cache = jnp.asarray(rng.normal(size=(3, 64, 576)), jnp.bfloat16)
    tables, heads = jnp.asarray([[2], [1]], jnp.int32), 16
    q = jnp.asarray(rng.normal(size=(2, 1, heads, 576)), jnp.bfloat16)

    @jax.jit
    def step(lens):
        interpret = implementation == "mosaic_gpu_interpret"
        sizes = dict(q_len=1, num_heads=heads, max_pages=1, interpret=interpret)
        schedule = mla.decode_schedule(lens, **sizes)
        return mla.mla_decode(
            q, cache, tables, lens, scale=0.1, schedule=schedule, implementation=implementation
        )

    out, lse = step(jnp.asarray([65, 64], jnp.int32))
    marked(out.astype(jnp.float32), lse, 0)


def test_a_schedule_has_no_part_for_it():
    make = functools.partial(
        mla.decode_schedule, q_len=1, num_heads=64, max_pages=3, page_size=64, interpret=True
    )
    garbage, none = (jax.jit(make)(np.int32([n, 64])) for n in (3 * 64 + 1, 0))
    jax.tree.map(np.testing.assert_array_equal, garbage, none)
    with pytest.raises(ValueError, match=r"decode_schedule: seq_lens \(2,\) holds -1, but len"):
        make(np.int32([-1, 64]))
