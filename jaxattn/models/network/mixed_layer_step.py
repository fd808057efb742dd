"""A layer of a step with prompts: its norms, its mixer and its feed-forward, over the state."""

import dataclasses
from typing import Any

from jax import Array

from jaxattn.core.cache.prompt_packing import PromptLines
from jaxattn.core.dispatch import Implementation
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.models.interface import DecodeBatch, PrefillBatch
from jaxattn.models.network.decode_layer_step import LayerPosition, caches_of, kept
from jaxattn.models.network.decoder_layer import DecoderLayer
from jaxattn.models.network.residual_collectives import ResidualCollectives, StepTokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedStep:
    """The inputs that all layers of a step with prompts share.

    Attributes:
        lines: The layout of the prompts.
        rows: The rows that decode in the same step, or None.
        tokens: The tokens of the prompts' lines, followed by those of `rows`.
        shared: The values that the layers of each cache share for `rows`, by the cache's name.
        vectors: The packed vectors of each segment, or None.
        weights: The small weights of decoding, by the cache's name.
    """

    collectives: ResidualCollectives
    prompts: PrefillBatch
    lines: PromptLines
    rows: DecodeBatch | None = None
    tokens: StepTokens
    shared: dict[str, Any] = dataclasses.field(default_factory=dict)
    vectors: tuple[Array, ...] | None
    weights: dict[str, Array] | None = None
    implementation: Implementation | None

    def layer(
        self,
        layer: DecoderLayer,
        position: LayerPosition,
        stacks: dict[str, Array],
        x: Array,
        state: DecodeState,
    ) -> tuple[Array, DecodeState]:
        """Returns the stream and the state after a layer.

        Args:
            stacks: The weights that its feed-forward reads in place.
        """
        block, next_repeat = position.block, position.next_repeat
        name = block.mixer.cache_name
        y, arrays, arena = block.mixer.mixed(
            layer.mixer,
            layer.read(layer.norm, x),
            caches_of(state, name),
            state.arena,
            self.prompts,
            self.lines,
            self.rows,
            self.collectives.spec.layer_of(position.segment, position.number, next_repeat),
            (self.weights or {}).get(name),
            self.shared.get(name),
            self.implementation,
        )
        arena = state.arena if arena is None else arena
        x = x + layer.given(layer.norm, self.collectives.total(y))
        state = kept(state, name, arrays, arena)
        # A kernel requested by name is for decoding: prefill's kernels reject some models.
        chosen = self.implementation if self.implementation == "xla" else None
        read = layer.read(layer.mlp_norm, x)
        y, _ = self.collectives.feed_forward(
            block, layer.mlp, read, self.tokens, stacks, next_repeat, None, chosen
        )
        return x + layer.given(layer.mlp_norm, y), state
