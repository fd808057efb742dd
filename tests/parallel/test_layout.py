"""Layouts: which GPU has which part, and that impossible ones say what is possible."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxattn.models import divided
from jaxattn.models.sharding import layouts
from jaxattn.models.sharding.axis_sharding import AxisSharding, ShardingError
from jaxattn.parallel import DeviceGroup, Dimension, Parallel, all_reduce
from tests.helpers.virtual_devices import on_virtual_devices
from tests.parallel.cases import MIXERS, decoder

HYBRID = decoder(("mla", "mlp"), ("gdn", "moe"))


def parts(parallel: Parallel, dimension: Dimension) -> list[int]:
    return [parallel.part(dimension, gpu) for gpu in range(parallel.gpus)]


def test_every_dimension_numbers_the_gpus_as_documented():
    eight = Parallel(data=2, tensor=4, context=2)
    assert parts(eight, "data") == [0, 0, 0, 0, 1, 1, 1, 1]
    assert parts(eight, "tensor") == [0, 1, 2, 3] * 2
    assert parts(eight, "heads") == [0, 0, 1, 1] * 2
    assert parts(eight, "context") == [0, 1] * 4


def test_experts_stay_in_a_group_where_they_can_and_else_meet():
    within, across = Parallel(data=2, tensor=2, expert=2), Parallel(data=2, tensor=2, expert=4)
    assert parts(within, "expert") == [0, 1, 0, 1] and not within.experts_meet
    assert parts(across, "expert") == [0, 1, 2, 3] and across.experts_meet
    mixed = Parallel(data=4, tensor=1, expert=2)
    assert parts(mixed, "expert") == [0, 0, 1, 1] and parts(mixed, "columns") == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "layout",
    [
        dict(data=2, tensor=4, context=2, expert=8),
        dict(data=4, tensor=2, expert=2),
        dict(tensor=8, context=2, expert=4),
        dict(data=3, tensor=4, context=4, expert=12),
    ],
)
def test_every_dimension_is_a_product_of_mesh_axes(layout):
    parallel = Parallel(**layout)
    names: tuple[Dimension, ...] = (
        "all", "data", "tensor", "heads", "context", "expert", "columns", "experts",
    )  # fmt: skip
    for name in names:
        size = 1
        for axis in parallel.axes(name):
            size *= parallel.mesh_axes[axis]
        assert size == parallel.size(name), name
        assert sorted(set(parts(parallel, name))) == list(range(size)), name


@pytest.mark.parametrize(
    "layout, message",
    [
        (dict(tensor=4, context=3), r"context=3 does not divide tensor=4.*1, 2, 4"),
        (dict(data=2, tensor=2, expert=3), r"expert=3 does not divide the 4 GPUs.*1, 2, 4"),
        (dict(tensor=0), "tensor must be at least 1; got 0"),
        (dict(data=6, tensor=6, context=3, expert=18), "do not nest"),
    ],
)
def test_an_impossible_layout_says_what_is_possible(layout, message):
    with pytest.raises(ValueError, match=message):
        Parallel(**layout)


def test_a_number_that_is_none_is_refused():
    with pytest.raises(TypeError, match="data must be an integer; got '2'"):
        Parallel(data="2")


@pytest.mark.parametrize(
    "model, layout, message",
    [
        (
            HYBRID,
            dict(tensor=3),
            "tensor=3 does not divide the 8 attention heads; possible values are 1, 2",
        ),
        (HYBRID, dict(tensor=16), "tensor=16 does not divide the 8 attention heads"),
        (HYBRID, dict(data=16, expert=16), "expert=16 does not divide the 8 experts"),
        (decoder(("gqa", "mlp")), dict(tensor=8, context=8), "use a smaller context"),
    ],
)
def test_a_model_refuses_a_layout_that_its_heads_do_not_have(model, layout, message):
    with pytest.raises(ShardingError, match=message):
        divided(model, Parallel(**layout))


def test_attention_with_a_window_refuses_spread_pages():
    windowed = dataclasses.replace(MIXERS["gqa"], window=8)
    block = dataclasses.replace(decoder(("gqa", "mlp")).spec.blocks[0], mixer=windowed)
    model = decoder(("gqa", "mlp"))
    model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, blocks=(block,)))
    with pytest.raises(ShardingError, match="a window.*use context=1"):
        divided(model, Parallel(tensor=2, context=2))


def test_all_layouts_of_a_model_are_found():
    found = set(layouts(HYBRID, 4))
    assert Parallel(tensor=4, context=2) in found and Parallel(data=4, expert=4) in found
    assert all(parallel.gpus == 4 for parallel in found)
    assert not any(parallel.tensor == 3 for parallel in layouts(HYBRID, 3))


def test_heads_fewer_than_gpus_are_repeated_in_order():
    cut = AxisSharding(-1, "tensor", ((2, 10), (4, 1)))
    assert [cut.ranges(part, 4) for part in range(4)] == [
        [(0, 10), (20, 21)],
        [(0, 10), (21, 22)],
        [(10, 20), (22, 23)],
        [(10, 20), (23, 24)],
    ]


@on_virtual_devices
def test_an_ordered_sum_is_that_of_the_gpus_in_turn_rounded_once():
    parts = np.float32([[1e4, 3.0], [-1e4, 2**-9], [0.5, 2**-9], [2**-8, 1.0]])[:, None]
    for ordered in (False, True):
        group = DeviceGroup(Parallel(tensor=4, ordered=ordered), tuple(jax.devices()[:4]))

        def step(part, group=group):
            return all_reduce(part[0], group.parallel, "tensor", jnp.bfloat16)

        specs = (PartitionSpec(group.parallel.axes("tensor")),)
        lowered = jax.jit(group.step(step, specs, PartitionSpec())).lower(parts)
        assert ("all_gather" in lowered.as_text()) == ordered
        if ordered:
            found = np.asarray(lowered.compile()(parts), np.float32)
            sent = parts.astype(jnp.bfloat16).astype(np.float32)
            assert found.tolist() == sent.sum(0).astype(jnp.bfloat16).tolist()
