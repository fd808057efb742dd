"""Which weights a decode step of one token reads next: each launch asks for some of them ahead.

The order is that of a layer's mixer and feed-forward. Behind the last layer of a pattern comes the
next repeat. Which experts a token takes is not known ahead: their weights are no part of it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from flax import nnx
from jax import Array

from jaxattn.core.stacked_layer import StackedLayer
from jaxattn.kernels.hopper.build.read_ahead import WeightSlab
from jaxattn.models.network.layer_scan import in_repeat
from jaxattn.nn import MixtureOfExperts
from jaxattn.nn.linear import Linear, StackedWeight
from jaxattn.nn.moe import ReadAhead

# Bytes that a launch asks for ahead: what the memory reads in 3 us, between two launches.
AHEAD_BYTES = 12 * 2**20


class Reading(NamedTuple):
    """What one launch reads.

    Attributes:
        slabs: of this repeat.
        tell: takes the slabs that follow.
    """

    slabs: tuple[WeightSlab, ...]
    tell: Callable[[tuple[WeightSlab, ...]], None]


def tell_what_follows(layers: Any, stacks: list[dict[str, Array]], following: Array) -> None:
    """Tells the modules of the repeat before `following` what is read after each of their weights.

    Args:
        layers: of the pattern, whose modules know where their weights lie.
        stacks: of each, the weights of its feed-forward that are read where they lie.
    """
    here = in_repeat(following)
    readings = [
        reading
        for layer, of_layer in zip(layers, stacks, strict=True)
        for reading in (*_of_module(layer.mixer), *_of_feed_forward(layer.mlp, of_layer, here))
    ]
    every = [slab for reading in readings for slab in reading.slabs]
    later = [dataclasses.replace(each, layer=_next(each.layer)) for each in every]
    before = 0
    for reading in readings:
        before += len(reading.slabs)
        reading.tell(tuple(_window([*every[before:], *later[:before]])))


def _next(layer: StackedLayer) -> StackedLayer:
    return dataclasses.replace(layer, place=layer.place + layer.per_repeat)


def _window(slabs: list[WeightSlab]) -> Iterator[WeightSlab]:
    """Those of the first `AHEAD_BYTES`."""
    left = AHEAD_BYTES
    for each in slabs:
        if left <= 0:
            return
        yield dataclasses.replace(each, nbytes=min(each.nbytes, left))
        left -= each.nbytes


def _of_module(module: nnx.Module) -> Iterator[Reading]:
    """In the module's `reading_order`, which names what one launch reads."""
    for names in getattr(module, "reading_order", ()):
        places: list[tuple[Any, str, StackedWeight]] = []
        for name in names:
            each = getattr(module, name, None)
            if isinstance(each, StackedWeight):
                places.append((module, name, each))
            elif isinstance(each, Linear) and each.in_stack is not None:
                places.append((each, "in_stack", each.in_stack))

        def tell(slabs: tuple[WeightSlab, ...], places: Any = places) -> None:
            for owner, name, place in places:
                setattr(owner, name, dataclasses.replace(place, ahead=slabs))

        slabs = (WeightSlab.whole(place.weights, place.layer) for *_, place in places)
        yield Reading(tuple(slabs), tell)


def _of_feed_forward(
    module: Any, stacks: Mapping[str, Array], layer: StackedLayer
) -> Iterator[Reading]:
    if not isinstance(module, MixtureOfExperts):
        yield from _of_module(module)
        return

    def tell(slabs: tuple[WeightSlab, ...]) -> None:
        module.ahead = ReadAhead(choice=slabs, experts=slabs)

    router, *shared = module.known_slabs(stacks, layer)
    yield Reading((router, *shared[:1]), tell)
