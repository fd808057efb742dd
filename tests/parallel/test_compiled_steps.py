"""What a compiled step over several devices does: its collectives, and what it copies."""

import functools

import pytest

from jaxattn import check_aliasing
from jaxattn.parallel import Parallel
from jaxattn.parallel.hlo_all_reduces import all_reduces
from tests.helpers.virtual_devices import on_virtual_devices
from tests.parallel.cases import SMALL, Stepped, decoder

LAYERS = (("mla", "moe"), ("gdn", "mlp"))


@functools.cache
def compiled_decode(parallel: Parallel):
    return Stepped(decoder(*LAYERS), parallel).compiled_decode


@pytest.mark.parametrize("layout", [dict(tensor=2, expert=2), dict(tensor=2, context=2)], ids=str)
@on_virtual_devices
def test_a_layer_has_two_all_reduces_of_one_operand(layout):
    text = compiled_decode(Parallel(**layout)).as_text()
    sums = [each for each in all_reduces(text) if each.of_layers]
    assert len(sums) == 2 * len(LAYERS)
    assert all(each.serves for each in sums), sums
    assert text.count("all-to-all(") == (1 if "context" in layout else 0)


@on_virtual_devices
def test_experts_over_data_groups_have_two_all_reduces_and_attention_none():
    text = compiled_decode(Parallel(data=2, expert=2)).as_text()
    sums = [each for each in all_reduces(text) if each.of_layers]
    # The tokens meet, and what the experts made of them adds up.
    assert len(sums) == 2 * sum(feed_forward != "mlp" for _, feed_forward in LAYERS)
    assert all(each.serves for each in sums), sums
    assert "all-to-all" not in text


@on_virtual_devices
def test_no_layer_asks_for_the_number_of_its_gpu():
    # In a loop over layers it is a launch that no CUDA graph takes: a layer would be two graphs.
    text = compiled_decode(Parallel(tensor=2, expert=2)).as_text()
    asked = [line for line in text.splitlines() if " partition-id(" in line]
    assert asked and not [line for line in asked if "/while/" in line]


@on_virtual_devices
def test_the_logits_are_never_gathered():
    text = compiled_decode(Parallel(tensor=2, expert=2)).as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    # The sampler's: a logit and its token for each row, from each device.
    assert len(gathers) == 1 and f"f32[2,{len(SMALL.lengths)},2]" in gathers[0]


@on_virtual_devices
def test_donated_buffers_stay_in_place():
    check_aliasing(compiled_decode(Parallel(tensor=2, context=2)), slack=4096)
