"""In float32 a decoder's greedy tokens over 2, 4 and 8 devices are those of one.

One small decoder has MLA with shared experts behind a gate, a delta net with a wide shared MLP, and
MLA with a dense MLP. Two others have gated grouped-query attention, and one matrix as embedding and
head; one of them has Kimi Delta Attention with experts. Two more have it beside MLA, as Kimi-Linear
and Ling-3.0 do. In another an indexer chooses fewer tokens than most rows have. Their 61 tokens go
evenly over no group.
"""

import numpy as np
import pytest

from jaxattn.parallel import ALONE, Parallel
from tests.helpers.virtual_devices import on_virtual_devices
from tests.parallel.cases import SMALL, Stepped, decoder, followed, on_one_device, prompts

HYBRID = (("mla", "moe"), ("gdn", "wide"), ("mla", "mlp"))
GROUPED = (("gqa", "moe"), ("gdn", "mlp"))
SPARSE = (("sparse mla", "mlp"), ("sparse mla without indexer", "moe"))
KDA = (("gqa", "mlp"), ("kda", "moe"))
KIMI = (("kda", "mlp"), ("unrotated mla", "moe"))
LING = (("bounded kda", "wide"), ("gated mla", "mlp"))


def assert_same(layers: tuple, tied: bool, layout: dict) -> None:
    model = decoder(*layers, tied=tied)
    expected, logits = on_one_device(model)
    assert len(np.unique(expected)) > 8, "the tokens have to differ for this to say anything"
    tokens, found = followed(model, Parallel(**layout))
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(found, logits, atol=2e-5)


@pytest.mark.slow_cases(
    reason="a cut of another axis; found by KDA next to experts and grouped-query attention there, "
    "whose data groups share the experts, and by latents and a delta net over tensor and context "
    "in parallel/test_engine too"
)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(dict(tensor=2), marks=pytest.mark.slow),
        pytest.param(dict(tensor=2, context=2, expert=2), marks=pytest.mark.slow),
        pytest.param(dict(data=2, expert=2), marks=pytest.mark.slow),
        pytest.param(dict(tensor=4, context=2), marks=pytest.mark.slow),
        pytest.param(dict(data=4, tensor=2, expert=8), marks=pytest.mark.slow),
        pytest.param(dict(tensor=8, context=4, expert=4), marks=pytest.mark.slow),
    ],
    ids=str,
)
@on_virtual_devices
def test_a_hybrid_with_experts(layout):
    assert_same(HYBRID, False, layout)


@pytest.mark.slow(
    reason="a cut of another axis; found by grouped-query attention over the same groups next to "
    "KDA there, and by a delta net over tensor and context in parallel/test_engine too"
)
@pytest.mark.parametrize(
    "layout",
    [
        dict(tensor=2, context=2),
        dict(data=2, tensor=2, context=2),
        dict(tensor=8, context=2),
    ],
    ids=str,
)
@on_virtual_devices
def test_grouped_query_attention_and_a_tied_head(layout):
    assert_same(GROUPED, True, layout)


@pytest.mark.slow(
    reason="a cut of another axis, or a step of prompts or of rows alone; found by FP8 keys in "
    "steps of both there and by latents over tensor and context in parallel/test_engine too"
)
@pytest.mark.parametrize(
    "layout",
    [dict(tensor=2, context=2), dict(data=2, tensor=4, context=4, expert=8)],
    ids=str,
)
@on_virtual_devices
def test_a_choice_of_tokens_over_all_devices_and_handed_on(layout):
    assert_same(SPARSE, False, layout)


@on_virtual_devices
def test_a_choice_among_fp8_keys_in_steps_of_prompts_and_rows():
    """Every second row has a token beside the others' chunks. What the first layer caches, rounded
    to FP8, is the same bits on each device and alone; the second takes over its choice."""
    model = decoder(("fp8 sparse mla", "mlp"), ("sparse mla without indexer", "moe"))
    texts, chunk = prompts(model, SMALL), SMALL.chunk
    decode = np.arange(len(texts)) % 2
    lens = decode * (np.minimum(SMALL.lengths, chunk) + 1)
    begun = [text[:chunk] for text in texts]
    rest = [text[chunk:][: chunk * (1 - row)] for text, row in zip(texts, decode, strict=True)]
    expected, found = (
        [steps.mixed(begun, 0, 0 * lens, 0 * lens), steps.mixed(rest, chunk, 7 * decode, lens)]
        for steps in (Stepped(model, layout) for layout in (ALONE, Parallel(tensor=2, context=2)))
    )
    assert len(np.unique(np.argmax(expected, axis=-1))) > 4
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.slow_cases(
    reason="a cut of another axis; found by KDA next to grouped-query attention there, and by "
    "latents over tensor and context in parallel/test_engine too"
)
@pytest.mark.parametrize(
    "layers, tied, layout",
    [
        (KDA, True, dict(data=2, tensor=2, context=2, expert=4)),
        pytest.param(KDA[1:], False, dict(tensor=2), marks=pytest.mark.slow),
        pytest.param(KIMI, False, dict(tensor=2), marks=pytest.mark.slow),
        pytest.param(LING, False, dict(tensor=2), marks=pytest.mark.slow),
        pytest.param(KIMI, False, dict(data=2, tensor=4, context=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
@on_virtual_devices
def test_kimi_delta_attention(layers, tied, layout):
    assert_same(layers, tied, layout)
