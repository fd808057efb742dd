"""Cache formats of a decoder: for all attention layers, or all but the first and last ones.

    model.with_cache_format("fp8", 2)    e4m3 keys and values, the compute dtype in four layers

Layers of another format have a separate cache, so the decoder gets other segments.
"""

import dataclasses
from collections.abc import Sequence

from jaxattn.core.cache.formats import CACHE_FORMATS
from jaxattn.models.blocks.block import Block


def reformatted(blocks: Sequence[Block], name: str, native_layers: int = 0) -> tuple[Block, ...]:
    """Returns the blocks with caches in a format; layers with a recurrence stay unchanged.

    Args:
        name: A name of `CACHE_FORMATS`; "auto" changes nothing.
        native_layers: Number of first and of last attention layers that keep their own format.

    Raises:
        ValueError: A kind of layer does not support the format, no layer supports any, or
            `native_layers` is too large; the message names the possible values.
    """
    if name not in CACHE_FORMATS:
        raise ValueError(
            f"cache_format must be one of {', '.join(CACHE_FORMATS)}; got cache_format={name!r}"
        )
    if name == "auto":
        if native_layers:
            raise ValueError(
                f"native_layers={native_layers} needs a cache_format other than 'auto'"
            )
        return tuple(blocks)
    if not blocks:
        return ()
    indices = [i for i, block in enumerate(blocks) if block.mixer.cache_formats]
    if not indices:
        kinds = ", ".join(sorted({type(block.mixer).__name__ for block in blocks}))
        raise ValueError(
            f"cache_format={name!r}: no layer of the model has a token cache ({kinds})"
        )
    if 2 * native_layers >= len(indices):
        raise ValueError(
            f"native_layers={native_layers} at each end cover all {len(indices)} attention layers; "
            "use fewer"
        )
    for place in indices:
        mixer = blocks[place].mixer
        if name not in mixer.cache_formats:
            has = ", ".join(("auto", *mixer.cache_formats))
            raise ValueError(
                f"cache_format={name!r} is not supported by {type(mixer).__name__}; use one of "
                f"{has}"
            )
    apart = {*indices[:native_layers], *indices[len(indices) - native_layers :]}
    found = list(blocks)
    for place in indices:
        mixer = blocks[place].mixer
        changed = mixer.with_separate_cache() if place in apart else mixer.in_format(name)
        found[place] = dataclasses.replace(blocks[place], mixer=changed)
    return tuple(found)
