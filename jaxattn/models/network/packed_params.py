"""Parameters in the form that a decoder's steps read fastest, with the small ones packed."""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxattn.models.blocks import Block, Mixer, Stream
from jaxattn.models.network.layer_segments import LayerSegment


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedParams:
    """Parameters in the form that the steps read fastest; see `pack_params`.

    Attributes:
        params: The decoder's parameters, with empty arrays instead of its layers' vectors.
        vectors: For each segment, float32 [repeats, total]: all vectors of a repeat in one row.
        weights: For each cache, by name, float32 [L, W]: the small weights of its layers; see
            `jaxattn.gdn.pack_gdn_weights` and `jaxattn.mla.pack_mla_weights`.
        norms: float32 [2 L, hidden], in the order of the layers: the norm before the mixer, then
            the norm before the feed-forward.
        extra_weights: The results of `Mixer.beside`, by segment and place in its pattern.
    """

    params: nnx.State
    vectors: tuple[Float[Array, "repeats total"], ...]
    weights: dict[str, Float[Array, "L W"]]
    norms: Float[Array, "N hidden"]
    extra_weights: dict[tuple[int, int], tuple[Array, Array]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def copies(self) -> tuple[Any, ...]:
        """The arrays that are stored a second time, so that decoding can read them from a stack."""
        return self.weights, self.norms, self.extra_weights


def pack_params(
    params: nnx.State | PackedParams, segments: Sequence[LayerSegment[Block]], stream: Stream
) -> PackedParams:
    """Packs the vectors of the layers (norms, gates). Do this once, at load time.

    Inside the layer loop XLA copies each vector out of its stack with a separate kernel, whereas
    one row is one copy. The inputs of decoding's kernels are also packed per layer; prefill reads
    them unpacked. The steps accept packed and unpacked parameters, and compute the same.
    """
    if isinstance(params, PackedParams):
        return params
    stacks: Any = params["segments"]
    # One program, because compiling one per array takes a second.
    small, nothing = jax.jit(lambda stacks: _small(stacks, segments))(stacks)
    empty = {
        s: _without_vectors(stacks[s], segment, nothing[s]) for s, segment in enumerate(segments)
    }
    extra_weights: dict[tuple[int, int], tuple[Array, Array]] = {}
    for s, segment in enumerate(segments):
        for place, block in enumerate(segment.pattern):
            layer: Any = empty[s]["layers"][place]
            if found := block.mixer.beside(stream, layer["mixer"]):
                extra_weights[s, place] = found
            _replace(layer["mlp"], block.feed_forward.pack(stream, layer["mlp"]))
            _replace(layer["mixer"], block.mixer.widened(stream, layer["mixer"]))
    rest = nnx.State({**params, "segments": type(stacks)(empty)})
    vectors, weights, norms = small
    return PackedParams(rest, vectors, weights, norms, extra_weights)


def _small(stacks: Any, segments: Sequence[LayerSegment[Block]]) -> tuple[Any, list[list[Array]]]:
    """Returns the packed small parameters, and the rest of each segment's vectors.

    Returns:
        (vectors, weights, norms) of `PackedParams`, and arrays without elements.
    """
    found = [vectors_of(stacks[s], segment) for s, segment in enumerate(segments)]
    vectors = tuple(
        jnp.concatenate([x.astype(jnp.float32) for x in each], axis=1) for each in found
    )
    packed = vectors, _mixer_weights(stacks, segments), _norms(stacks, segments)
    return packed, [[x[:, :0] for x in each] for each in found]


def _without_vectors(
    stack: Any, segment: LayerSegment[Block], replacements: Sequence[Array]
) -> Any:
    """Returns a segment's parameters with `replacements` instead of its vectors."""
    each = iter(replacements)
    return jax.tree.map_with_path(
        lambda path, leaf: next(each) if is_vector(path, leaf, segment) else leaf, stack
    )


def _replace(module: Any, packed: Mapping[str, Array]) -> None:
    """Replaces the parameters with these names, such as "gate_proj.weight"."""
    for name, array in packed.items():
        *inner, last = name.split(".")
        holder = functools.reduce(operator.getitem, inner, module)
        holder[last] = holder[last].replace(array)


def is_vector(path: Any, leaf: Any, segment: LayerSegment[Block]) -> bool:
    """Returns whether a stacked parameter [repeats, n] is packed.

    Packed are a block's norms, and the vectors of a mixer whose `pack` provides decoding's inputs.
    The steps read all others in place.
    """
    if leaf.ndim != 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return False
    _, place, part, name, *_ = (getattr(each, "key", 0) for each in path)
    if part == "mixer":
        mixer = segment.pattern[place].mixer
        return type(mixer).pack is not Mixer.pack and name not in mixer.unpacked_params
    return part in ("norm", "mlp_norm")


def vectors_of(stack: Any, segment: LayerSegment[Block]) -> list[Any]:
    """Returns the packed parameters of a segment, in order."""
    leaves = jax.tree.leaves_with_path(stack)
    return [leaf for path, leaf in leaves if is_vector(path, leaf, segment)]


def _mixer_weights(stacks: Any, segments: Sequence[LayerSegment[Block]]) -> dict[str, Array]:
    """Returns the weights of each cache in the order of its layers, segment after segment."""
    cache_weights: dict[str, list[Array]] = {}
    for s, segment in enumerate(segments):
        of_cache: dict[str, list[Array]] = {}
        for place, block in enumerate(segment.pattern):
            weights = block.mixer.pack(stacks[s]["layers"][place]["mixer"])
            if weights is not None:
                of_cache.setdefault(block.mixer.cache_name, []).append(weights)
        for name, weights_of in of_cache.items():
            rows = jnp.stack(weights_of, axis=1).reshape(-1, weights_of[0].shape[-1])
            cache_weights.setdefault(name, []).append(rows)
    return {name: _joined(rows) for name, rows in cache_weights.items()}


def _norms(stacks: Any, segments: Sequence[LayerSegment[Block]]) -> Array:
    found = []
    for s, segment in enumerate(segments):
        layers = [stacks[s]["layers"][place] for place in range(len(segment.pattern))]
        norms = [layer[n]["weight"][...] for layer in layers for n in ("norm", "mlp_norm")]
        found.append(jnp.stack(norms, axis=1).reshape(-1, norms[0].shape[-1]))
    return _joined(found).astype(jnp.float32)


def _joined(rows: list[Array]) -> Array:
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows)
