"""With a fixed `split_tokens` a sequence has the same bits alone and among any others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn
from jaxattn.kernels.gdn.chunk.tiles import CHUNK
from jaxattn.kernels.gdn.prefill.inter_chunk import launch as gdn_prefill_state
from jaxattn.kernels.gdn.prefill.intra_chunk import launch as gdn_prefill_chunk
from tests.helpers.gdn_prefill_cases import make_case

# Key heads, value heads, tokens, and what lies before and behind them. What the kernels choose by
# the size of a batch differs: a state's halves in a block, and the value heads taken at once.
PACKINGS = [
    (4, 16, 1500, [3, 700], [1, 0, 900]),
    (4, 16, 1500, [1, 4096, 0], [2500, 64]),
    (16, 32, 700, [5], [1200, 63]),
]
PADDING = 10


def choices(lens, padding, split, key_heads, value_heads):
    """(halves in a block of the output pass, value heads at once), as launch.py asks."""
    tokens = sum(lens) + padding
    busy = max(len(lens), -(-tokens // split)) if split else len(lens)
    group, chunks = value_heads // key_heads, -(-tokens // CHUNK)
    return (
        gdn_prefill_state.halves_in_a_block(busy * value_heads),
        gdn_prefill_chunk.value_heads_at_once(chunks, value_heads, group),
    )


def assert_the_same_alone(implementation, key_heads, value_heads, tokens, before, behind, split):
    case = make_case(
        [*before, tokens, *behind], key_heads=key_heads, value_heads=value_heads, gates=0.05,
        padding=PADDING,
    )  # fmt: skip
    step = jax.jit(
        functools.partial(
            gdn.chunk_gated_delta_rule, use_qk_l2norm=True, output_final_state=True,
            split_tokens=split, implementation=implementation,
        )
    )  # fmt: skip
    out, states = step(*case.args, **case.packed)
    index, start = len(before), sum(before)
    own = [x[:, start : start + tokens] for x in case.args]
    state = case.initial_state[index : index + 1]
    for ends in (jnp.array([0, tokens]), None):
        alone, final = step(*own, initial_state=state, cu_seqlens=ends)
        assert np.isfinite(np.asarray(alone, np.float32)).all() and np.isfinite(final).all()
        for a, b in ((alone, out[:, start : start + tokens]), (final, states[index : index + 1])):
            np.testing.assert_array_equal(*(np.asarray(x).view(np.uint8) for x in (a, b)))


@pytest.mark.parametrize("split", [0, 512])
def test_choices_differ_between_alone_and_packed(split):
    packed = []
    for key_heads, value_heads, tokens, before, behind in PACKINGS:
        heads = split, key_heads, value_heads
        assert choices([tokens], 0, *heads) == (1, 1)
        packed.append(choices([*before, tokens, *behind], PADDING, *heads))
    assert packed == [(2, 2), (2, 4), (2, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("split", [0, 512])
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_the_same_bits_alone_and_packed(packing, split):
    assert_the_same_alone("mosaic_gpu", *packing, split)


@pytest.mark.slow(
    reason="an order of sums that packing changes; a GPU runs each packing, and choices that "
    "packing changes are found without a kernel"
)
@pytest.mark.slow_cases(
    reason="an order of sums that packing changes; found by bits without segments too"
)
@pytest.mark.parametrize("split", [0, pytest.param(64, marks=pytest.mark.slow)])
def test_the_same_bits_alone_and_packed_in_the_interpreter(split, monkeypatch):
    """On a machine so small that the choices differ here too."""
    monkeypatch.setattr(gdn_prefill_chunk, "NUM_SMS", 1)
    monkeypatch.setattr(gdn_prefill_state, "NUM_SMS", 8 if split else 4)
    tokens, before, behind = 66, [3], [60, 0]
    assert choices([tokens], 0, split, 1, 2) == (1, 1)
    assert choices([*before, tokens, *behind], PADDING, split, 1, 2) == (2, 2)
    assert_the_same_alone("mosaic_gpu_interpret", 1, 2, tokens, before, behind, split)
