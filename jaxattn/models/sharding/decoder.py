"""A decoder on several GPUs: the model that each GPU runs, and the placement of its parameters.

The embedding is whole on every GPU, because a step reads one row of it per token. The head is
divided by vocabulary. A tied matrix is divided too, and a token's row comes from the GPU that holds
it.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxattn.models.blocks.block import Block
from jaxattn.models.interface import Model
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.network.decoder_spec import DecoderSpec
from jaxattn.models.network.packed_params import PackedParams
from jaxattn.models.sharding.axis_sharding import (
    WHOLE,
    AxisSharding,
    Cuts,
    ShardingError,
    compute_local_shape,
    joined,
    of_fp8,
    of_tiles,
    own,
    partition_spec,
    shard_layer,
)
from jaxattn.models.weight_map.quantized_linears import four_bit_form, linear_of
from jaxattn.parallel import DeviceGroup, Parallel


@dataclasses.dataclass(frozen=True)
class ShardedDecoder(DecoderModel):
    """The model that each GPU of a layout runs, with fewer heads, columns or experts.

    Parameters, caches and scratch are those of one GPU. The steps run inside `jax.shard_map` over
    the mesh of a `DeviceGroup`, and return the logits of one part of the vocabulary.

    Attributes:
        unsharded: The model that the GPUs divide.
    """

    unsharded: DecoderModel = dataclasses.field(kw_only=True)

    @property
    def whole(self) -> DecoderModel:
        return self.unsharded

    def param_shapes(self) -> nnx.State:
        """Returns the whole model's shapes, divided, so that all layouts share its trace."""

        def share(path: Any, leaf: Any) -> Any:
            cuts = self.cuts_of(key_of(path))
            return jax.ShapeDtypeStruct(
                compute_local_shape(leaf.shape, cuts, self.parallel), leaf.dtype
            )

        return jax.tree.map_with_path(share, self.whole.param_shapes())

    def param_specs(self) -> nnx.State:
        return _with_specs(self, self.param_shapes())

    def packed_specs(self) -> PackedParams:
        packed = jax.eval_shape(self.pack, self.param_shapes())
        each: Any = PartitionSpec(self.parallel.axes("all"))
        return PackedParams(
            params=_with_specs(self, packed.params),
            vectors=tuple(each for _ in packed.vectors),
            weights=dict.fromkeys(packed.weights, each),
            norms=each,
            extra_weights=jax.tree.map(lambda _: each, packed.extra_weights),
        )

    def place_params(self, params: Any, group: DeviceGroup) -> Any:
        placed = []
        for device in group.local_devices:
            own = self.slice_local_params(params, group.number(device))
            placed.append(jax.tree.map(lambda x, device=device: jax.device_put(x, device), own))
        return group.join(placed, self.param_specs())

    def joined_param(self, path: Any, leaf: jax.Array) -> jax.Array:
        return joined(leaf, self.cuts_of(key_of(path)), self.parallel)

    def slice_local_params(self, params: nnx.State, gpu: int) -> nnx.State:
        """Returns GPU `gpu`'s share of the whole model's parameters, on their current device."""

        def share(path: Any, leaf: Any) -> Any:
            return own(leaf, self.cuts_of(key_of(path)), self.parallel, gpu)

        return jax.tree.map_with_path(share, params)

    def cuts_of(self, key: tuple[Any, ...]) -> Cuts:
        """Returns the shardings of the parameter at `key` of the whole model's state."""
        return cuts_of(self.whole, self.parallel, key)


def divided(model: Model, parallel: Parallel) -> Model:
    """Returns the model that one GPU of the layout runs, a `ShardedDecoder`.

    On one GPU this is the model itself.

    Raises:
        ShardingError: The model does not support the layout; the message says what it supports.
    """
    if parallel.gpus == 1:
        return model
    if not isinstance(model, DecoderModel):
        raise ShardingError(
            f"several GPUs need a jaxattn.models.DecoderModel; {type(model).__name__} runs on one "
            "GPU"
        )
    spec = model.spec
    blocks = {block: _shard_block(block, spec, parallel) for block in dict.fromkeys(spec.blocks)}
    local = dataclasses.replace(
        spec, blocks=tuple(blocks[block] for block in spec.blocks), parallel=parallel
    )
    made = ShardedDecoder(local, model.tokens, unsharded=model)
    for key, leaf in nnx.to_flat_state(model.param_shapes()):
        if key[-1] == "scale" or leaf.dtype == jnp.uint8:
            made.cuts_of(key)  # rejects cuts within FP8 blocks or 4-bit tiles
    return made


def _shard_block(block: Block, spec: DecoderSpec, parallel: Parallel) -> Block:
    mixer = shard_layer(block.mixer, spec.stream, parallel)
    feed_forward = shard_layer(block.feed_forward, spec.stream, parallel)
    return dataclasses.replace(block, mixer=mixer.layer, feed_forward=feed_forward.layer)


def cuts_of(model: DecoderModel, parallel: Parallel, key: tuple[Any, ...]) -> Cuts:
    """Returns the shardings of the parameter at `key` of a whole model's state."""
    spec = model.spec
    by_vocabulary = ((spec.vocab_size, 1),)
    match key:
        case ("embedding",):
            return (AxisSharding(-2, "tensor", by_vocabulary),) if spec.tie_embeddings else WHOLE
        case ("lm_head", "weight"):
            return (AxisSharding(-1, "tensor", by_vocabulary),)
        case ("segments", int(number), "layers", int(place), ("mixer" | "mlp") as part, *names):
            block = spec.segments[number].pattern[place]
            layer = block.mixer if part == "mixer" else block.feed_forward
            cuts = shard_layer(layer, spec.stream, parallel).cuts
            path = ".".join(str(name) for name in names if name not in ("weight", "scale"))
            found = cuts.get(path, WHOLE)
            if linear_of(spec, key) is None:
                return found
            form = four_bit_form(spec, key)
            if form is not None:
                return tuple(
                    of_tiles(cut, parallel.size(cut.dimension), path, form) for cut in found
                )
            scales = names[-1] == "scale"
            return tuple(of_fp8(cut, parallel.size(cut.dimension), path, scales) for cut in found)
    return WHOLE


def _with_specs(model: ShardedDecoder, state: nnx.State) -> nnx.State:
    """Returns the state with a PartitionSpec instead of each parameter."""

    def spec(path: Any, leaf: Any) -> Any:
        # Arrays that `pack` left empty are the same on every GPU.
        cuts = model.cuts_of(key_of(path)) if leaf.size else WHOLE
        return partition_spec(cuts, len(leaf.shape), model.parallel)

    return jax.tree.map_with_path(spec, state)


def key_of(path: Any) -> tuple[Any, ...]:
    """Converts a path in a JAX tree to a parameter's key in `nnx.to_flat_state`."""
    return tuple(each.key for each in path if hasattr(each, "key"))


def layouts(model: DecoderModel, gpus: int) -> Iterator[Parallel]:
    """Yields every layout of `gpus` GPUs that the model supports."""
    numbers = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for tensor in numbers:
        for context in (n for n in numbers if tensor % n == 0):
            for expert in numbers:
                try:
                    parallel = Parallel(
                        data=gpus // tensor, tensor=tensor, context=context, expert=expert
                    )
                    divided(model, parallel)
                except ValueError:
                    continue
                yield parallel
