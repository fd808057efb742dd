"""MLA ops name the argument that does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mla
from jaxattn.core.numerics.rope import RopeConfig, rotation
from tests.ops.mla.test_decode import decode
from tests.ops.mla.test_prefill import HEADS, NOPE, ROPE, W_UK, W_UV

GOOD = dict(
    q=np.zeros((2, 1, 3, 24), np.float32),
    kv_cache=np.zeros((5, 16, 24), np.float32),
    block_tables=np.zeros((2, 4), np.int32),
    seq_lens=np.zeros(2, np.int32),
    scale=1.0,
    kv_lora_rank=16,
)


STACK = np.zeros((7, 5, 16, 24), np.float32)


@pytest.mark.parametrize(
    "changed, error, words",
    [
        (dict(q=np.zeros((2, 3, 24), np.float32)), ValueError, r"q \[B, S, H, D\].*\(2, 3, 24\)"),
        (dict(q=np.zeros((2, 0, 3, 24), np.float32)), ValueError, r"none.*\(2, 0, 3, 24\)"),
        (dict(q=np.zeros((2, 1, 3, 20), np.float32)), ValueError, r"kv_cache .*D = 24.*D = 20"),
        (
            dict(q=np.zeros((2, 1, 3, 24), np.int32)),
            TypeError,
            r"q must be .*int32 \(2, 1, 3, 24\)",
        ),
        (dict(q=[1.0]), TypeError, "q must be an array, got list"),
        (dict(q=(GOOD["q"],)), ValueError, r"a pair, got 1 arrays, \[\(2, 1, 3, 24\)\]"),
        (dict(q=(GOOD["q"], jnp.ones(3))), ValueError, r"q\[1\] \[B, S, H, P\].*shape \(3,\)"),
        (
            dict(q=(GOOD["q"], jnp.ones((2, 1, 3, 8), jnp.bfloat16))),
            TypeError,
            r"q\[1\] must be float32, got bfloat16 \(2, 1, 3, 8\)",
        ),
        (dict(kv_cache=np.zeros((5, 24), np.float32)), ValueError, r"kv_cache \[N, C, D\].*5, 24"),
        (dict(kv_cache=np.zeros((5, 0, 24))), ValueError, r"kv_cache .*none.*\(5, 0, 24\)"),
        (dict(kv_cache=STACK), ValueError, r"kv_cache \(7, 5, 16, 24\) is a stack.*give layer="),
        (dict(layer=0), ValueError, r"kv_cache \(5, 16, 24\) has no axis for layer=0"),
        (dict(kv_cache=STACK, layer=7), ValueError, r"layer=7 is out of range: .*has 7"),
        (dict(kv_cache=STACK, layer=-1), ValueError, "layer=-1 is out of range"),
        (dict(kv_cache=STACK, layer=True), TypeError, "layer must be an integer, got bool"),
        (dict(kv_cache=STACK, layer=1.0), TypeError, "layer must be an integer, got float"),
        (dict(kv_cache=STACK, layer=np.zeros(1, int)), TypeError, r"scalar, got int64 \(1,\)"),
        (dict(block_tables=np.zeros((2, 4))), TypeError, r"_tables must .*float64 \(2, 4\)"),
        (dict(block_tables=np.full((2, 4), 2**31)), ValueError, r"_tables .* holds 2147483648, wh"),
        (dict(block_tables=np.zeros((3, 4), np.int32)), ValueError, "block_tables.*B = 3.*B = 2"),
        (
            dict(seq_lens=np.zeros(2, np.float32)),
            TypeError,
            r"seq_lens must be integers, got float32 \(2,\)",
        ),
        (dict(seq_lens=np.zeros((2, 1), np.int32)), ValueError, r"seq_lens \[B\].*\(2, 1\)"),
        (
            dict(seq_lens=np.array([65, 0], np.int32)),
            ValueError,
            r"\(2,\) .*65.*\(2, 4\).*16.*reach 64",
        ),
        (dict(scale=None), TypeError, "scale must be a Python number.*softmax_scale"),
        (dict(scale=0.0), ValueError, "scale must be positive and finite, got 0.0"),
        (dict(scale=float("nan")), ValueError, "scale must be positive and finite, got nan"),
        (dict(query_lens=np.zeros(3, np.int32)), ValueError, r"query_lens \[B\].*\(3,\).*B = 2"),
        (dict(query_lens=np.zeros(2, bool)), TypeError, r"query_lens must .*bool \(2,\)"),
        (
            dict(query_lens=np.array([2, 0], np.int32)),
            ValueError,
            r"query_lens \(2,\) holds 2, but q \(2, 1, 3, 24\) has 1 tokens per row",
        ),
        (
            dict(kv_cache=np.zeros((5, 16, 24), jnp.float8_e5m2)),
            TypeError,
            r"got .*e5m2 \(5, 16, 24\)",
        ),
        (
            dict(kv_cache=np.zeros((5, 16, 24), np.int8)),
            TypeError,
            r"kv_cache .*int8 \(5, 16, 24\)",
        ),
        (dict(kv_lora_rank=25), ValueError, r"kv_lora_rank .*D = 24.*25"),
        (dict(kv_lora_rank=16.0), ValueError, "kv_lora_rank must be an integer .*got 16.0"),
        (dict(block_tables=[[0]]), ValueError, r"block_tables .*B = 1, but q .*B = 2"),
        (
            dict(block_tables=[[0], []]),
            TypeError,
            r"in rows of equal length, got list \[\[0\], \[\]\]",
        ),
        (dict(block_tables=[]), ValueError, r"block_tables \[B, M\] needs 2 axes.*\(0,\)"),
        (dict(seq_lens=["1", "2"]), TypeError, r"seq_lens \[B\] must be integers"),
        (dict(block_tables=np.zeros(4, np.int32)), ValueError, r"block_tables \[B, M\].*\(4,\)"),
        (
            dict(schedule=mla.Schedule(np.zeros((2, 5), np.int32), np.zeros((3, 3), np.int32))),
            ValueError,
            r"schedule is for 3 rows, but q \(2, 1, 3, 24\) has 2",
        ),
        (dict(kv_lora_rank=0), ValueError, "kv_lora_rank .* got 0"),
        (dict(kv_lora_rank=True), ValueError, "kv_lora_rank must be an integer .*got True"),
        (dict(schedule=[0]), TypeError, "schedule must be a result of decode_schedule, got list"),
        (dict(arena={}), TypeError, r"arena must be an Arena from .* got dict"),
    ],
)
def test_decode_names_the_argument_that_does_not_fit(changed, error, words):
    # Before an implementation is asked, so before anything is launched or refused.
    for implementation in (None, "mosaic_gpu", "xla"):
        with pytest.raises(error, match=f"mla_decode: .*{words}"):
            mla.mla_decode(**(GOOD | changed), implementation=implementation)


SIZES = dict(q_len=1, num_heads=3, max_pages=4)


@pytest.mark.parametrize(
    "changed, error, words",
    [
        (
            dict(seq_lens=np.zeros(2, np.float32)),
            TypeError,
            r"seq_lens must be integers, got float32 \(2,\)",
        ),
        (dict(seq_lens=np.zeros((2, 1), np.int32)), ValueError, r"seq_lens \[B\].*\(2, 1\)"),
        (dict(seq_lens=np.zeros(0, np.int32)), ValueError, r"seq_lens \[B\].*none.*\(0,\)"),
        (dict(seq_lens=[3.0, 4]), TypeError, r"seq_lens must be integers, got float64 \(2,\)"),
        (
            dict(seq_lens=[3, -4]),
            ValueError,
            r"seq_lens \(2,\) holds -4, but lengths must be at least 0",
        ),
        (
            dict(seq_lens=np.array([65, 0], np.int32), page_size=16),
            ValueError,
            r"seq_lens \(2,\) holds 65, but max_pages=4 of page_size=16 tokens reach 64; give",
        ),
        (dict(page_size=0), ValueError, "page_size must be a positive integer, got 0"),
        (dict(page_size=64.0), ValueError, "page_size must be a positive integer, got 64.0"),
        (dict(max_pages=0), ValueError, "max_pages must be a positive integer, got 0"),
        (dict(num_heads=0), ValueError, "num_heads must be a positive integer, got 0"),
        (dict(num_heads=True), ValueError, "num_heads must be a positive integer, got True"),
        (dict(q_len=-1), ValueError, "q_len must be a positive integer, got -1"),
        (dict(batch=0), ValueError, "batch must be a positive integer, got 0"),
    ],
)
def test_schedule_and_scratch_name_the_argument_that_does_not_fit(changed, error, words):
    if "batch" not in changed:
        with pytest.raises(error, match=rf"mla\.decode_schedule: {words}"):
            mla.decode_schedule(**(SIZES | dict(seq_lens=GOOD["seq_lens"]) | changed))
    if "seq_lens" not in changed:
        with pytest.raises(error, match=rf"mla\.scratch: {words}"):
            mla.scratch(**(SIZES | dict(batch=2) | changed))


def test_scale_has_no_default():
    with pytest.raises(TypeError, match="scale"):
        mla.mla_decode(**{k: v for k, v in GOOD.items() if k != "scale"})


def test_lengths_are_checked_only_where_they_are_known():
    traced = jax.jit(lambda lens: decode(**(GOOD | dict(seq_lens=lens)))[0])
    traced(np.array([65, 0], np.int32))
    lens = jnp.array([65, 0])
    constant = jax.jit(lambda: decode(**(GOOD | dict(seq_lens=lens))))
    with pytest.raises(ValueError, match="reach 64"):
        constant()
    jax.jit(lambda lens: mla.decode_schedule(lens, **SIZES, page_size=16))(lens)
    q = np.zeros((2, 1, 3, 24), np.float32)
    out, _ = jax.jit(lambda lens: mla.causal_attention(q, q, q, scale=1.0, lengths=lens))(lens)
    assert np.isfinite(out).all()


NUMBERS = "must be (an array|integers)"


def test_the_other_ops_name_the_argument_that_does_not_fit():
    cache, tables, lens = (GOOD[name] for name in ("kv_cache", "block_tables", "seq_lens"))
    latent = np.zeros((2, 3, 24), np.float32)
    with pytest.raises(ValueError, match=r"mla_cache_write: kv_cache .*D = 24.*latent .*D = 23"):
        mla.mla_cache_write(cache, latent[..., 1:], tables, lens)
    with pytest.raises(ValueError, match="mla_cache_write: kv_cache .* is a stack"):
        mla.mla_cache_write(STACK, latent, tables, lens)
    with pytest.raises(
        ValueError, match=r"mla_cache_write: seq_lens \(2,\) holds 65.*\(2, 4\).*reach 64"
    ):
        mla.mla_cache_write(cache, latent, tables, np.array([65, 0], np.int32))
    with pytest.raises(
        ValueError, match=r"query_lens \(2,\) holds 4, but latent \(2, 3, 24\) has 3 tokens"
    ):
        mla.mla_cache_write(cache, latent, tables, lens, query_lens=np.array([4, 0], np.int32))
    with pytest.raises(ValueError, match=r"mla_cache_write: latent \[B, S, D\].*\(3, 24\)"):
        mla.mla_cache_write(cache, latent[0], tables, lens)
    with pytest.raises(TypeError, match=r"_write: query_lens must be integers, got float64"):
        mla.mla_cache_write(cache, latent, tables, lens, query_lens=np.zeros(2))
    with pytest.raises(ValueError, match=r"absorb_query: w_uk \[H, nope, R\].*H = 4.*H = 3"):
        mla.absorb_query(np.zeros((2, 1, 3, 5), np.float32), np.zeros((4, 5, 16), np.float32))
    with pytest.raises(ValueError, match=r"absorb_output: w_uv \[H, R, Dv\].*R = 8.*R = 16"):
        mla.absorb_output(np.zeros((2, 1, 3, 16), np.float32), np.zeros((3, 8, 5), np.float32))
    words = (
        r"causal_attention: .* same dtype, got q float32 \(2, 1, 3, 24\), k bfloat16 \(2, 1, 3, "
    )
    with pytest.raises(TypeError, match=words):
        mla.causal_attention(GOOD["q"], jnp.bfloat16(GOOD["q"]), GOOD["q"], scale=1.0)
    with pytest.raises(
        ValueError,
        match=r"causal_attention: lengths \(2,\) holds 2, but q \(2, 1, 3, 24\) has 1 tokens per",
    ):
        mla.causal_attention(*[GOOD["q"]] * 3, scale=1.0, lengths=np.array([2, 0], np.int32))
    q = np.zeros((2, 3, HEADS, NOPE + ROPE), np.float32)
    ok = dict(
        q=q, latent=latent, w_uk=W_UK, w_uv=W_UV, kv_cache=cache, block_tables=tables,
        seq_lens=lens, query_lens=np.zeros(2, np.int32), scale=1.0,
    )  # fmt: skip
    mla.mla_prefill(**ok)
    for changed, words in (
        (dict(q=q[..., 1:]), r"q's last axis.*\(2, 3, 2, 13\).*\(2, 6, 16\)"),
        (
            dict(query_lens=np.array([4, 0], np.int32)),
            r"query_lens \(2,\) holds 4, but q .*3 tokens per row",
        ),
        (
            dict(seq_lens=np.array([0, 70], np.int32)),
            r"seq_lens \(2,\) holds 70.*\(2, 4\).*reach 64",
        ),
        (dict(kv_cache=STACK), r"kv_cache \(7, 5, 16, 24\) is a stack"),
        (dict(w_uk=W_UK[:1]), r"w_uk \[H, nope, R\].*H = 1.*H = 2"),
        (dict(w_uv=W_UV[:, 1:]), r"w_uv \[H, R, Dv\].*R = 15.*R = 16"),
        (dict(latent=latent[:, 1:]), r"latent \[B, T, D\].*T = 2.*T = 3"),
        (dict(block=0), "block must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=f"mla_prefill: .*{words}"):
            mla.mla_prefill(**(ok | changed))
    for block in (5.5, True, jnp.int32(4), "4"):
        with pytest.raises(TypeError, match="mla_prefill: block must be a Python integer, got"):
            mla.mla_prefill(**ok, block=block)
    mla.mla_prefill(**ok, block=np.int64(4))
    with pytest.raises(TypeError, match=r"_write: config must be a .*RopeConfig, got dict"):
        mla.mla_cache_write(
            cache, latent, tables, lens, config={}, rotation=rotation(lens, RopeConfig(dim=8))
        )
    for given in (None, [1.0]):
        for name in ("q", "latent", "w_uk", "w_uv", "kv_cache", "block_tables", "seq_lens"):
            with pytest.raises(TypeError, match=f"mla_prefill: {name} {NUMBERS}, got "):
                mla.mla_prefill(**(ok | {name: given}))
        for name in ("q", "kv_cache", "block_tables", "seq_lens"):
            with pytest.raises(TypeError, match=f"mla_decode: {name} {NUMBERS}, got "):
                mla.mla_decode(**(GOOD | {name: given}))
        write = dict(kv_cache=cache, latent=latent, block_tables=tables, seq_lens=lens)
        for name in write:
            with pytest.raises(TypeError, match=f"mla_cache_write: {name} {NUMBERS}, got "):
                mla.mla_cache_write(**(write | {name: given}))
