"""Decode steps with several repeats of layers in a turn of the loop."""

import types

import jax
import numpy as np
import pytest

from jaxattn.bench.model.model_lookup import find
from jaxattn.models import divided
from jaxattn.models.network.decoder_network import DecoderNetwork
from jaxattn.models.network.layer_scan import scan_layers
from jaxattn.parallel import Parallel
from tests.models.test_unrolled import decoded


@pytest.mark.parametrize("together", [1, 2, 3, 6])
def test_each_repeat_runs_once_and_in_order(together):
    numbers = np.arange(6, dtype=np.int32)

    def body(carry, xs):
        following, (number,) = xs
        return 10 * carry + 3 * number + following

    found = jax.jit(
        lambda x: scan_layers(6, body, x, ((numbers,),), repeats_per_iteration=together)
    )(np.int32(1))
    expected = 1
    for number in range(6):
        expected = 10 * expected + 3 * number + number + 1
    assert int(found) == expected


@pytest.mark.slow(
    reason="a repeat that reads another's weights; found by the loop alone and the same over two "
    "devices in test_fused_sums too"
)
def test_the_same_bits_with_two_repeats_in_a_turn(monkeypatch):
    one = decoded("qwen3_5_moe", "float32")
    monkeypatch.setattr(
        DecoderNetwork, "_choose_unroll", lambda self, segment, _: 2 - segment.repeats % 2
    )
    several = decoded("qwen3_5_moe", "float32")
    assert several[2] != one[2]
    np.testing.assert_array_equal(several[0], one[0])
    for found, expected in zip(several[1], one[1], strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "name, layout, fused, repeats",
    [
        ("DeepSeek-V2-Lite", dict(data=2, expert=2), True, 13),  # of 26
        ("DeepSeek-V2-Lite", dict(data=4, expert=4), True, 13),
        ("DeepSeek-R1", dict(data=8, expert=8), True, 2),  # of 58
        ("Qwen3.5-397B-A17B-FP8", dict(data=4, expert=4), True, 3),  # of 15, of four layers each
        ("DeepSeek-V2-Lite", dict(data=2, expert=2), False, 1),
        ("DeepSeek-V2-Lite", dict(tensor=4, context=4, expert=2), True, 13),
        ("Qwen3.5-35B-A3B", dict(tensor=2), True, 2),  # of 10, of four layers each
        ("DeepSeek-V2-Lite", {}, False, 1),
    ],
)
def test_steps_of_several_gpus_in_few_launches_have_several_repeats_in_a_turn(
    name, layout, fused, repeats
):
    spec = divided(find(name)[2], Parallel(**layout)).spec
    longest = max(spec.segments, key=lambda segment: segment.repeats)
    network = types.SimpleNamespace(spec=spec)
    assert DecoderNetwork._choose_unroll(network, longest, fused) == repeats  # type: ignore[arg-type]
    assert longest.repeats % repeats == 0
