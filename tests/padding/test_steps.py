"""The whole step with poison around it: arena, pages and slots of nobody, padding rows' tokens.

Logits of real rows and all that they own keep their bits, padding rows' logits are exactly 0, and
what belongs to nobody is not written.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.models.blocks import GDN, MLA
from jaxattn.models.embedded.hybrid_config import HybridConfig
from jaxattn.models.embedded.hybrid_model import Hybrid
from jaxattn.models.interface import DecodeBatch, PrefillBatch, jit_step
from tests.helpers import engine_cases, model_cases
from tests.helpers.engine_cases import RECURRENT
from tests.helpers.poison import devices, every_poison, fill, fp8_scale, is_zero, same_bits

CONFIGS = {
    "cpu": RECURRENT,
    "gpu": HybridConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_repeats=2,
        num_attention_heads=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
}
IMPLEMENTATION = {"cpu": "xla", "gpu": "mosaic_gpu"}
PAGES, SLOTS, WIDTH = 9, 5, 3


# With `--dist loadgroup` one process compiles these steps, not each.
pytestmark = pytest.mark.xdist_group("padding_steps")


@functools.cache
def params_of(device):
    if device == "cpu":
        return engine_cases.params_of(RECURRENT)  # from a file
    return Hybrid(CONFIGS[device]).init_params(jax.random.key(0))


@functools.cache
def step_of(device, step):
    chosen = IMPLEMENTATION[device] if step == "decode" or device == "cpu" else None
    prefill = step == "prefill"
    return jit_step(getattr(Hybrid(CONFIGS[device]), step), implementation=chosen, prefill=prefill)


def state_of(device, rows, q_len, lens, slots, poison):
    """(state, tables): rows own the pages and the slots that they use, all else is poison."""
    config = CONFIGS[device]
    shapes = jax.eval_shape(
        lambda: model_cases.state_of(config, rows, PAGES, SLOTS, max_pages=WIDTH, q_len=q_len)
    )
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: fill(leaf.shape, leaf.dtype, poison), shapes)
    order = iter(1 + rng.permutation(PAGES - 1))
    tables = np.full((rows, WIDTH), 2**31 - 1 if poison else 0, np.int32)
    for row, length in enumerate(lens):
        for j in range(-(-length // PAGE_SIZE)):
            tables[row, j] = page = next(order)
            valid = min(PAGE_SIZE, length - j * PAGE_SIZE)
            tokens = state.array("kv_cache")[:, page, :valid]
            state.array("kv_cache")[:, page, :valid] = rng.normal(size=tokens.shape)
        if slots[row] >= 0:
            for pool in (state.array("conv_state"), state.array("ssm_state")):
                pool[:, slots[row]] = 0.1 * rng.normal(size=pool[:, 0].shape)
    return state, tables


def tokens_of(rows, count, lens, poison, vocab):
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, vocab, (rows, count), dtype=np.int32)
    tokens[np.asarray(lens) == 0] = -(2**31) if poison else 0
    return tokens


def decode_case(device, lens, slots, q_len, poison):
    rows = len(lens)
    state, tables = state_of(device, rows, q_len, lens, slots, poison)
    tokens = tokens_of(rows, q_len, lens, poison, CONFIGS[device].vocab_size)
    batch = DecodeBatch(tokens, np.asarray(lens, np.int32), tables, np.asarray(slots, np.int32))
    return "decode", state, batch


def prefill_case(device, lens, slots, chunk, poison):
    """Rows 0 and 2 read `chunk` tokens more, of 8 in the bucket."""
    rows = len(lens)
    state, tables = state_of(device, rows, 1, lens, slots, poison)
    tokens = tokens_of(rows, 8, lens, poison, CONFIGS[device].vocab_size)
    new = np.asarray([chunk if length else 0 for length in lens], np.int32)
    if poison:
        tokens[np.arange(8) >= new[:, None]] = 2**31 - 1
    fields = (new, np.asarray(lens, np.int32), tables, np.asarray(slots, np.int32))
    return "prefill", state, PrefillBatch(tokens, *fields)


def check(make, device, lens, slots, *rest, poison, garbage=0):
    """Runs the case without poison and with it, and compares; `garbage` is padding rows' length."""
    step, clean, batch = make(device, lens, slots, *rest, None)
    run, params = step_of(device, step), params_of(device)
    wanted, after_clean = run(params, jax.tree.map(jnp.asarray, clean), batch)
    _, dirty, batch = make(device, lens, slots, *rest, poison)
    real = np.asarray(lens) > 0
    seq_lens = np.where(real, lens, garbage).astype(np.int32)
    if garbage:  # and a page of somebody else
        batch.block_tables[~real] = batch.block_tables[real][0, 0]
    batch = dataclasses.replace(batch, seq_lens=seq_lens)
    logits, after = run(params, jax.tree.map(jnp.asarray, dirty), batch)
    same_bits(logits[real], wanted[real])
    if garbage > 0 and make is decode_case:
        logits = logits[real]  # what a length above 0 sees is its row's own affair
    else:
        is_zero(logits[~real])
    assert np.isfinite(np.asarray(logits)).all()
    if real.any():
        for one, other in zip(fp8_scale(logits), fp8_scale(wanted[real]), strict=True):
            same_bits(one, other)

    owned = np.zeros((PAGES, PAGE_SIZE), bool)
    for row, length in enumerate(lens):
        for j in range(-(-length // PAGE_SIZE)):
            owned[batch.block_tables[row, j], : min(PAGE_SIZE, length - j * PAGE_SIZE)] = True
    cache, before = np.asarray(after.array("kv_cache")), dirty.array("kv_cache")
    same_bits(cache[:, owned], np.asarray(after_clean.array("kv_cache"))[:, owned])
    same_bits(cache[:, ~owned], before[:, ~owned])
    live = np.isin(np.arange(SLOTS), slots)
    for name in ("conv_state", "ssm_state"):
        pool = np.asarray(after.array(name))
        same_bits(pool[:, live], np.asarray(after_clean.array(name))[:, live])
        same_bits(pool[:, ~live], dirty.array(name)[:, ~live])


LENS = [0, 70, 0, 0, 1, 61, 0, 0]
IN_USE = [-1, 0, -1, -1, 4, 2, -1, -1]  # slot 0 and the last one are live


@pytest.mark.sampled
@devices
@every_poison
@pytest.mark.parametrize("q_len", [1, 4])
def test_decode_with_padding_all_around(q_len, poison, device):
    lens = [max(n, q_len) if n else 0 for n in LENS]
    check(decode_case, device, lens, IN_USE, q_len, poison=poison)


@pytest.mark.sampled
@devices
@every_poison
@pytest.mark.parametrize("padding", [127, 1023])
def test_decode_of_one_real_row_in_a_large_bucket(padding, poison, device):
    if device == "cpu" and padding == 1023 and poison not in ("nan", "3e38"):
        pytest.skip("two poisons are enough at this size on a CPU")
    lens, slots = [130] + [0] * padding, [3] + [-1] * padding
    check(decode_case, device, lens, slots, 1, poison=poison)


@devices
@every_poison
def test_decode_of_padding_alone(poison, device):
    check(decode_case, device, [0] * 8, [-1] * 8, 1, poison=poison)


@devices
@every_poison
@pytest.mark.parametrize("chunk", [1, 7, 8])
def test_a_chunk_with_a_tail_and_a_padding_row(chunk, poison, device):
    check(prefill_case, device, [66 + chunk, 0, chunk], [4, -1, 0], chunk, poison=poison)


@every_poison
@pytest.mark.parametrize("garbage", [-1, -(2**31), 10**6, 2**31 - 1])
def test_no_slot_beside_a_length_of_garbage(garbage, poison):
    """Neither a page nor a slot of anybody is written, and no other row's logits change."""
    for q_len in (1, 4):
        lens = [max(n, q_len) if n else 0 for n in LENS]
        check(decode_case, "cpu", lens, IN_USE, q_len, poison=poison, garbage=garbage)
    check(prefill_case, "cpu", [73, 0, 7], [4, -1, 0], 7, poison=poison, garbage=garbage)


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(
            1,
            marks=pytest.mark.slow(
                reason="scratch that is read after another layer or step; found by 61 layers in "
                "padding/test_steps.py, and by steps one after another there too"
            ),
        ),
        61,
    ],
)
def test_an_arena_poisoned_between_layers_and_steps(layers, monkeypatch):
    """What a layer left in scratch is nothing to the next one, whatever the depth."""
    config = dataclasses.replace(RECURRENT, num_repeats=layers)
    monkeypatch.setitem(CONFIGS, "cpu", config)
    traced = []

    def step(params, state, batch, between):
        traced.append(between)
        return Hybrid(config).decode(params, state, batch, implementation="xla")

    def spoiled(arena):
        return jax.tree.map(
            lambda dirty, kept: jnp.where(traced[-1], dirty, kept), arena.poison(), arena
        )

    for mixer in (GDN, MLA):

        def decode(self, module, x, arrays, arena, *rest, real=mixer.decode):
            y, arrays, arena = real(self, module, x, arrays, spoiled(arena), *rest)
            return y, arrays, spoiled(arena)

        monkeypatch.setattr(mixer, "decode", decode)

    rng = np.random.default_rng(0)
    shapes = Hybrid(config).param_shapes()
    params = jax.tree.map(lambda x: jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype), shapes)
    _, first, batch = decode_case("cpu", LENS, IN_USE, 1, None)
    run = jax.jit(step)
    found = {}
    for between in (False, True):
        state, logits = first, []
        for longer in range(2):
            seq_lens = np.where(batch.seq_lens > 0, batch.seq_lens + longer, 0)
            each, state = run(params, state, dataclasses.replace(batch, seq_lens=seq_lens), between)
            logits.append(each)
        lanes = [np.asarray(lane, np.float32) for lane in state.arena.lanes.values() if lane.size]
        assert all(np.isnan(lane).all() for lane in lanes) == between  # it was there
        found[between] = [
            *logits,
            state.array("kv_cache"),
            state.array("conv_state"),
            state.array("ssm_state"),
        ]
    for clean, poisoned in zip(found[False], found[True], strict=True):
        same_bits(clean, poisoned)
    assert np.isfinite(found[True][0]).all() and np.asarray(found[True][0]).any()


@devices
def test_a_nan_in_a_real_row_shows_there_alone(device):
    step, state, batch = decode_case(device, LENS, IN_USE, 1, "3e38")
    run, params = step_of(device, step), params_of(device)
    wanted, _ = run(params, jax.tree.map(jnp.asarray, state), batch)
    state.array("kv_cache")[:, batch.block_tables[1, 0], 3] = np.nan
    logits, after = run(params, jax.tree.map(jnp.asarray, state), batch)
    assert np.isnan(np.asarray(logits[1])).all()
    others = np.arange(len(LENS)) != 1
    same_bits(np.asarray(logits)[others], np.asarray(wanted)[others])


@devices
def test_steps_one_after_another_in_a_poisoned_arena(device):
    """What an op left in the arena, or a larger batch, is never read by the next."""
    run, params = step_of(device, "decode"), params_of(device)
    results = []
    for poison in (None, "3e38"):
        _, state, batch = decode_case(device, LENS, IN_USE, 1, None)
        state = jax.tree.map(jnp.asarray, state)
        for _ in range(3):
            if poison:
                arena = jax.tree.map(
                    lambda leaf: jnp.asarray(fill(leaf.shape, leaf.dtype, "3e38")), state.arena
                )
                state = dataclasses.replace(state, arena=arena)
            logits, state = run(params, state, batch)
            results.append(np.asarray(logits))
            grown = np.where(batch.seq_lens > 0, batch.seq_lens + 1, 0)
            batch = dataclasses.replace(batch, seq_lens=grown.astype(np.int32))
    half = len(results) // 2
    for clean, poisoned in zip(results[:half], results[half:], strict=True):
        same_bits(clean, poisoned)
