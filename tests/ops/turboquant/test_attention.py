"""Attention over a TurboQuant cache in plain JAX, and its write, against float64."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.turboquant.codec import PRESETS, TurboFormat
from jaxattn.ops.turboquant.attention import turbo_attention
from jaxattn.ops.turboquant.cache_write import turbo_cache_write
from jaxattn.ops.turboquant.vllm_import import import_vllm_slots
from tests.helpers.turbo_cases import (
    assert_turbo_close,
    hadamard64,
    quantize64,
    read_page,
    turbo_case,
)
from tests.helpers.turbo_compiled import page_slots, slot_pages

DATA = Path(__file__).parents[2] / "data"
each_preset = pytest.mark.parametrize("preset", PRESETS)
pytestmark = pytest.mark.filterwarnings("ignore:the cache format:UserWarning")


# Traced, as tables left of a window name pages that do not exist.
traced = jax.jit(turbo_attention, static_argnames=("form", "window", "soft_cap"))
imported = jax.jit(import_vllm_slots, static_argnames="form")


def attend(case):
    return traced(*case.args, form=case.form, layer=case.layer, **case.options)


@pytest.mark.sampled
@each_preset
@pytest.mark.parametrize(
    "options",
    [
        dict(lens=[70, 0, 1, 600], dim=128, group=5),
        dict(lens=[200, 2, 130], q_len=4, query_lens=[4, 3, 1], sinks=True, gate=True, page=16),
        dict(lens=[300, 0, 64], q_len=2, query_lens=[1, 0, 2], window=64, page=32, sinks=True),
        dict(lens=[90], dim=256, group=1, kv_heads=1, soft_cap=5.0, dtype=jnp.float32, page=128),
    ],
    ids=["groups of 5", "ragged tokens", "a window", "256 dims"],
)
def test_matches_float64(preset, options):
    case = turbo_case(preset=preset, **options)
    assert_turbo_close(case, *attend(case))


@pytest.mark.sampled
@each_preset
def test_what_is_written_is_read(preset):
    """Tokens in chunks of 1, 15 and 17 over pages of 16, padding among them; other bytes stay."""
    rng, form = np.random.default_rng(0), TurboFormat(preset=preset, head_dim=64)
    k, v = rng.normal(size=(2, 2, 33, 2, 64)).astype(np.float32)
    cache = jnp.asarray(rng.integers(0, 256, (2, 8, 2, 16 * form.slot_bytes)), jnp.uint8)
    before = np.asarray(page_slots(form, cache))
    tables = jnp.asarray([[5, 1, 7], [0, 3, 2]], jnp.int32)
    write = jax.jit(turbo_cache_write, static_argnames=("form", "layer"))
    at = 0
    for size in (1, 15, 17):
        beyond = np.full((2, 2, 2, 64), np.nan, np.float32)
        new = [np.concatenate([x[:, at : at + size], beyond], axis=1) for x in (k, v)]
        at += size
        lens, query_lens = jnp.asarray([at, at]), jnp.asarray([size, size])
        cache = write(cache, *new, tables, lens, form=form, query_lens=query_lens, layer=1)
    after, held = np.asarray(page_slots(form, cache)), np.asarray(cache)[1]
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[1, [4, 6]], before[1, [4, 6]])
    np.testing.assert_array_equal(after[1, [7, 2], :, 1:], before[1, [7, 2], :, 1:])
    for row, head in np.ndindex(2, 2):
        pages = [read_page(form, held[n, head]) for n in tables[row].tolist()]
        read = [np.concatenate(some)[:33] for some in zip(*pages, strict=True)]
        expected = quantize64(preset, *(x[row, :, head].astype(np.float64) for x in (k, v)))
        for mine, theirs in zip(read, expected, strict=True):
            off = np.abs(mine - theirs) > 1e-5 * np.abs(theirs).max(axis=-1, keepdims=True)
            assert off.any(axis=-1).sum() <= 1


def test_no_slot_is_written_for_padding():
    form = TurboFormat(preset="4bit_nc", head_dim=64)
    cache = jnp.full((3, 1, 16 * form.slot_bytes), 0x7F, jnp.uint8)
    x = jnp.ones((3, 2, 1, 64))
    tables = jnp.asarray([[0], [1], [-1]], jnp.int32)
    lens, new = jnp.asarray([0, 1, 2]), jnp.asarray([2, 2, 0])
    out = jax.jit(turbo_cache_write, static_argnames="form")(
        cache, x, x, tables, lens, form=form, query_lens=new
    )
    slots = np.array(page_slots(form, out))
    assert (slots[1, 0, 0] != 0x7F).any()  # position 0 of row 1; its other token is at -1
    slots[1, 0, 0] = 0x7F
    assert (slots == 0x7F).all()


def test_a_chunk_is_as_its_tokens_one_by_one():
    """Continuation prefill of 130 tokens behind 70, all at once, and by 1 and 129; and the first
    chunk as a continuation of an empty prefix."""
    case = turbo_case([200], "k3v4_nc", q_len=200, group=2, kv_heads=1)
    whole, whole_lse = attend(case)
    assert_turbo_close(case, whole, whole_lse)
    for first, count in ((70, 130), (70, 1), (71, 129), (0, 70)):
        lens = jnp.asarray([first + count], jnp.int32)
        out, lse = traced(
            case.q[:, first : first + count], *case.args[1:3], lens, form=case.form, layer=1
        )
        np.testing.assert_allclose(lse, whole_lse[:, first : first + count], atol=1e-5)
        np.testing.assert_allclose(
            np.asarray(out, np.float32),
            np.asarray(whole[:, first : first + count], np.float32),
            atol=2e-2,
        )


def test_queries_in_blocks(monkeypatch):
    case = turbo_case([90, 40], "4bit_nc", q_len=37, query_lens=[37, 20], gate=True, group=1)
    monkeypatch.setattr("jaxattn.ops.turboquant.attention.QUERY_BLOCK", 16)
    assert_turbo_close(case, *attend(case))


def test_nothing_dense_is_as_large_as_the_cache():
    """32,768 tokens of a row, 128 MiB as bfloat16 keys and values, in blocks of 512."""
    form = TurboFormat(preset="4bit_nc", head_dim=128)
    shapes = [
        jax.ShapeDtypeStruct((1, 1, 32, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((512, 8, 64 * form.slot_bytes), jnp.uint8),
        jax.ShapeDtypeStruct((1, 512), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    ]
    op = jax.jit(lambda *args: turbo_attention(*args, form=form))
    memory = op.lower(*shapes).compile().memory_analysis()
    # Of 512 tokens and 8 heads: keys and values float32, their indices, and what XLA turns round.
    assert memory.temp_size_in_bytes < 8 * 512 * 8 * 2 * 128 * 4


def test_a_nan_that_a_row_sees_stays_in_it():
    case = turbo_case([70, 70], "4bit_nc", kv_heads=1)
    page = int(case.block_tables[0, 0])
    slots = np.array(page_slots(case.form, case.kv_cache))
    slots[case.layer, page, 0, 3, -4:] = 0xFF  # its scale and minimum
    case.kv_cache = slot_pages(case.form, jnp.asarray(slots))
    out, lse = attend(case)
    assert np.isnan(np.asarray(out[0], np.float32)).all()
    assert np.isfinite(np.asarray(out[1], np.float32)).all() and np.isfinite(lse).all()


def test_gradients_of_queries_sinks_and_gates():
    case = turbo_case(
        [40], "3bit_nc", group=2, kv_heads=1, sinks=True, gate=True, dtype=jnp.float32
    )

    @jax.jit
    def total(q, sinks, gate):
        return turbo_attention(q, *case.args[1:], form=case.form, layer=1, sinks=sinks, gate=gate)[
            0
        ].sum()

    args = case.q, case.options["sinks"], case.options["gate"]
    for i, grad in enumerate(jax.jit(jax.grad(total, (0, 1, 2)))(*args)):
        step = np.random.default_rng(i).normal(size=grad.shape).astype(np.float32)
        both = [
            total(*(x + s * 1e-2 * step if j == i else x for j, x in enumerate(args)))
            for s in (1, -1)
        ]
        np.testing.assert_allclose(np.sum(grad * step), (both[0] - both[1]) / 2e-2, rtol=2e-2)


def vllm_slots(preset, k, v):
    """vLLM's slots of keys and values [.., D] as its store writes them, and what it reads."""
    dim = k.shape[-1]
    key_bits, value_bits = PRESETS[preset]

    def packed(codes, bits):
        words = np.packbits(
            (codes[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(*k.shape[:-1], -1),
            axis=-1, bitorder="little",
        )  # fmt: skip
        return words  # 8 codes in 24 bits, 2 in 8, the first in the lowest bits

    parts = []
    if key_bits == 8:
        parts.append(np.clip(k, -448, 448).astype(jnp.float8_e4m3fn).view(np.uint8))
    else:
        positive = {
            4: [0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326],
            3: [0.2451, 0.7560, 1.3439, 2.1519],
        }[key_bits]
        table = np.concatenate([-np.array(positive)[::-1], positive]) / dim**0.5
        norm = np.linalg.norm(k, axis=-1, keepdims=True)
        codes = np.searchsorted((table[1:] + table[:-1]) / 2, k / norm @ hadamard64(dim), "right")
        parts += [packed(codes, key_bits), norm.astype(np.float16).view(np.uint8)]
        chosen = table[codes]
        k = norm.astype(np.float16) * chosen / np.linalg.norm(chosen, axis=-1, keepdims=True)
    low = v.min(axis=-1, keepdims=True)
    scale = (v.max(axis=-1, keepdims=True) - low) / (2**value_bits - 1)
    codes = np.clip(np.floor((v - low) / scale + 0.5), 0, 2**value_bits - 1).astype(int)
    parts.append(packed(codes, value_bits))
    parts += [x.astype(np.float16).view(np.uint8) for x in (scale, low)]
    v = codes * scale.astype(np.float16).astype(float) + low.astype(np.float16)
    return np.concatenate(parts, axis=-1), k, v


@pytest.mark.sampled
@pytest.mark.parametrize("dim", [64, 128, 256])
@each_preset
def test_slots_of_vllm_are_read(preset, dim):
    rng, form = np.random.default_rng(1), TurboFormat(preset=preset, head_dim=dim)
    slots, keys, values = vllm_slots(preset, *rng.normal(size=(2, 3, 32, 2, dim)))
    pages = np.asarray(imported(jnp.asarray(slots), form=form))
    assert pages.shape == (3, 2, 32 * form.slot_bytes)
    for n, head in np.ndindex(3, 2):
        mine, theirs = read_page(form, pages[n, head])
        np.testing.assert_allclose(theirs, values[n, :, head], atol=1e-6)
        expected = keys[n, :, head]
        if preset == "k8v4":
            expected = expected.astype(jnp.float8_e4m3fn).astype(float)
        lost = np.linalg.norm(mine - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert (lost < (0 if preset == "k8v4" else 0.02) + 1e-9).all(), lost.max()
        np.testing.assert_allclose(
            np.linalg.norm(mine, axis=-1), np.linalg.norm(expected, axis=-1), rtol=1e-3
        )


@each_preset
def test_slots_that_vllms_own_store_wrote_are_read(preset):
    """Bytes of its Triton kernel, made by tests/helpers/make_vllm_slots.py: they are what
    `vllm_slots` says, and are read so. A key is zeros, one is long, and a value is constant."""
    made = np.load(DATA / "vllm_slots.npz")
    form = TurboFormat(preset=preset, head_dim=128)
    k, v = (made[name][None].astype(np.float64) for name in "kv")
    with np.errstate(invalid="ignore", divide="ignore"):
        slots, keys, values = (x[0, :, 0] for x in vllm_slots(preset, k, v))
    (page,) = np.asarray(imported(jnp.asarray(made[preset]), form=form))[0]
    zero = (k[0, :, 0] == 0).all(axis=-1)
    assert zero.sum() == 1 and (read_page(form, page)[0][zero] == 0).all()
    # A number that lies between two codes may become either.
    same = slots == made[preset][0, :, 0]
    assert same[~zero].mean() > 0.998
    alike = same.all(axis=-1)
    assert alike.sum() >= 12
    for mine, theirs, most in zip(
        read_page(form, page), (keys, values), (1e-9 if preset == "k8v4" else 0.02, 1e-6),
        strict=True,
    ):  # fmt: skip
        lost = np.linalg.norm((mine - theirs)[alike], axis=-1)
        assert (lost <= most * np.linalg.norm(theirs[alike], axis=-1)).all()


@pytest.mark.gpu
@each_preset
def test_slots_of_vllms_store_on_a_gpu_are_read(preset):
    """vLLM's Triton kernel makes the bytes, where vLLM is installed."""
    torch = pytest.importorskip("torch")
    store = pytest.importorskip("vllm.v1.attention.ops.triton_turboquant_store")
    rng, form = np.random.default_rng(2), TurboFormat(preset=preset, head_dim=128)
    k, v = rng.normal(size=(2, 48, 4, 128)).astype(np.float32)
    cache = torch.zeros((3, 16, 4, form.slot_bytes), dtype=torch.uint8, device="cuda")
    config = pytest.importorskip("vllm.model_executor.layers.quantization.turboquant.config")
    centroids = pytest.importorskip("vllm.model_executor.layers.quantization.turboquant.centroids")
    settings = config.TurboQuantConfig.from_cache_dtype(f"turboquant_{preset}", 128)
    levels = centroids.get_centroids(128, settings.centroid_bits).cuda()
    store.triton_turboquant_store(
        torch.from_numpy(k).cuda().half(),
        torch.from_numpy(v).cuda().half(),
        cache,
        torch.arange(48, device="cuda"),
        torch.from_numpy(hadamard64(128).astype(np.float32)).cuda(),
        (levels[1:] + levels[:-1]) / 2,
        mse_bits=settings.key_mse_bits,
        key_packed_size=settings.key_packed_size,
        value_quant_bits=settings.effective_value_quant_bits,
        key_fp8=settings.key_fp8,
    )
    pages = np.asarray(import_vllm_slots(jnp.asarray(cache.cpu().numpy()), form=form))
    expected = quantize64(preset, *(x.astype(np.float16).astype(np.float64) for x in (k, v)))
    for n, head in np.ndindex(3, 4):
        some = slice(16 * n, 16 * n + 16)
        for mine, theirs in zip(read_page(form, pages[n, head]), expected, strict=True):
            theirs = theirs[some, head]
            assert np.linalg.norm(mine - theirs) < 0.03 * np.linalg.norm(theirs)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(form="4bit_nc"), "form must be a TurboFormat, got str"),
        (dict(form=TurboFormat(preset="k8v4", head_dim=64)), r"must end in C \* 100 bytes"),
        (dict(q=jnp.zeros((1, 1, 4, 128))), "q .* has head_dim 128, but the cache's format has 64"),
        (dict(q=jnp.zeros((1, 1, 3, 64))), "H must be a multiple of Hk"),
        (dict(window=0), "window counts the token itself"),
        (dict(schedule=(1, 2)), "schedule must be a result of gqa.decode_schedule, got tuple"),
        (dict(seq_lens=jnp.asarray([999])), "seq_lens"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    case = turbo_case([20], "4bit_nc", group=2)
    names = "q", "kv_cache", "block_tables", "seq_lens"
    given = dict(zip(names, case.args, strict=True)) | {"form": case.form, "layer": 1} | change
    with pytest.raises((TypeError, ValueError), match=message):
        turbo_attention(**given)
