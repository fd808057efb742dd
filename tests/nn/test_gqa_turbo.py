"""Grouped-query attention over TurboQuant pages: what it reads is what its cache holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.core.turboquant.codec import hadamard
from jaxattn.nn import TurboQuantAttention
from jaxattn.parallel import Parallel
from tests.helpers.at_once import at_once
from tests.helpers.draws import normals
from tests.helpers.kernel_cases import slow
from tests.helpers.turbo_compiled import dequantize, page_slots, unpack

pytestmark = pytest.mark.filterwarnings("ignore:the cache format:UserWarning")
HIDDEN, HEADS, KV_HEADS, DIM, PAGE, LENGTH = 32, 4, 2, 64, 16, 23
TABLES = np.array([[2, 0], [1, 3]], np.int32)


@functools.cache
def module(preset: str = "k8v4", **options) -> TurboQuantAttention:
    rope = RopeConfig(dim=DIM, theta=1e4, interleaved=False)
    return TurboQuantAttention(
        preset, HIDDEN, HEADS, KV_HEADS, DIM, rope=rope, qk_norm=True, dtype="float32",
        rngs=nnx.Rngs(0), **options,
    )  # fmt: skip


def empty(made: TurboQuantAttention) -> jax.Array:
    return jnp.full((1, 4, KV_HEADS, PAGE * made.form.slot_bytes), 0xFF, jnp.uint8)


@functools.cache
def tokens() -> jax.Array:
    return normals(1)(2, LENGTH, HIDDEN)


prefill = nnx.jit(lambda made, *args, **given: made.prefill(*args, layer=0, **given))
decode = nnx.jit(lambda made, *args, **given: made.decode(*args, layer=0, **given))


def read(made: TurboQuantAttention, cuts: list[int]):
    """Both rows' outputs, their prompts in chunks that end at `cuts`, and the cache."""
    cache, outs, done = empty(made), [], 0
    for end in cuts:
        lens = np.full(2, end, np.int32)
        y, cache = prefill(
            made, tokens()[:, done:end], cache, block_tables=TABLES, seq_lens=lens,
            query_lens=np.full(2, end - done, np.int32),
        )  # fmt: skip
        outs.append(y)
        done = end
    return np.concatenate(outs, axis=1), cache


@pytest.mark.parametrize("preset", ["k8v4", "3bit_nc"])
def test_a_prompt_reads_its_own_codes(preset):
    """Against float64 attention over the dequantized cache."""
    made = module(preset)
    y, cache = read(made, [LENGTH])
    positions = jnp.asarray(np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (2, LENGTH)))
    queries = lambda: made._apply_rope(*made._projected(tokens(), positions), positions)[0]  # noqa: E731
    q = np.asarray(at_once(queries), np.float64)
    turn = hadamard(DIM) if made.form.rotated else np.eye(DIM)
    out = np.zeros_like(q)
    for row, head in np.ndindex(2, HEADS):
        slots = page_slots(made.form, np.asarray(cache)[0, TABLES[row], head // 2])
        slots = slots.reshape(-1, made.form.slot_bytes)[:LENGTH]
        k, v = (np.asarray(x, np.float64) for x in dequantize(made.form, unpack(made.form, slots)))
        scores = q[row, :, head] @ (k @ turn).T * DIM**-0.5
        scores[np.triu_indices(LENGTH, 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[row, :, head] = weights / weights.sum(axis=1, keepdims=True) @ v
    expected = np.asarray(at_once(made._project_out, jnp.asarray(out, jnp.float32)))
    np.testing.assert_allclose(y, expected, atol=2e-5)


@pytest.mark.slow_cases(
    reason="a chunk that reads other codes; found by the same with a gate and a prompt's own "
    "codes too"
)
@pytest.mark.parametrize("gated", [slow(False), True])
def test_chunks_and_steps_give_what_a_whole_prompt_gives(gated):
    made = module("4bit_nc", gated=gated, window=9, sinks=True)
    whole, cache = read(made, [LENGTH])
    chunks, others = read(made, [10, 20])
    step = decode(
        made, tokens()[:, 20:], others, block_tables=TABLES, seq_lens=np.full(2, LENGTH, np.int32)
    )
    np.testing.assert_array_equal(step[1], cache)
    np.testing.assert_allclose(np.concatenate([chunks, step[0]], axis=1), whole, atol=2e-5)


def test_padding_is_0_and_writes_nothing():
    made = module()
    lens = np.array([2, 0], np.int32)
    y, cache = prefill(
        made, tokens()[:, :3], empty(made), block_tables=TABLES, seq_lens=lens, query_lens=lens
    )
    assert (np.asarray(y)[1] == 0).all() and (np.asarray(y)[0, 2] == 0).all()
    assert (np.asarray(cache)[0, [1, 3]] == 0xFF).all()


def test_a_traced_row_beyond_its_table_is_nan():
    made, x = module(), tokens()[:, :1]
    step = nnx.jit(
        lambda made, lens: made.decode(x, empty(made), block_tables=TABLES, seq_lens=lens, layer=0)
    )
    y = np.asarray(step(made, jnp.array([33, 1], jnp.int32))[0])
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()


def test_pages_of_several_gpus_and_another_format_are_refused():
    made = module()
    args = dict(block_tables=TABLES, seq_lens=np.ones(2, np.int32), layer=0)
    with pytest.raises(ValueError, match="context=2 spreads a row's pages over GPUs"):
        made.prefill(
            tokens()[:, :1], empty(made), query_lens=np.ones(2, np.int32),
            parallel=Parallel(tensor=2, context=2), **args,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"must end in C \* 100 bytes"):
        made.decode(tokens()[:, :1], empty(made)[..., :-1], **args)
