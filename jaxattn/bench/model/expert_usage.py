"""Counts of the experts that a decode step touches, from a pass of its own that is not timed.

The model is built a second time from blocks that do the same and tell a listener what their routers
chose. It takes the same parameters and the same state.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxattn.core.dispatch import Implementation
from jaxattn.models.blocks import Block, MoE, Stream
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.models.interface import jit_step
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.nn import MixtureOfExperts


class ExpertChoices:
    """The experts that were chosen, int32 [T, K] for each layer with experts."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def __call__(self, ids: Any) -> None:
        self.seen.append(np.asarray(ids))


class RecordingExperts(MixtureOfExperts):
    """The module, which tells `choices` of each call's experts."""

    choices: ExpertChoices

    def choose(self, logits: Float[Array, "T N"], *args: Any, **options: Any) -> Any:
        return self._told(super().choose(logits, *args, **options))

    def open(self, tokens: Any, *args: Any, **options: Any) -> Any:
        return self._told(super().open(tokens, *args, **options))

    def _told(self, found: Any) -> Any:
        """What was found, of which the experts are the first."""
        jax.debug.callback(self.choices, found[0][:, : self.config.top_k])
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordingMoE(MoE):
    """The block, built of watched experts."""

    choices: ExpertChoices

    def build(self, stream: Stream, rngs: nnx.Rngs) -> MixtureOfExperts:
        module = super().build(stream, rngs)
        module.__class__ = RecordingExperts  # whatever arguments the block builds it with
        module.choices = self.choices  # type: ignore[attr-defined]
        return module


def moe_layers(model: DecoderModel) -> int:
    return sum(isinstance(block.feed_forward, MoE) for block in model.spec.blocks)


def watched(model: DecoderModel, choices: ExpertChoices) -> DecoderModel:
    """The same model with watched experts; its parameters have the same shapes."""

    def block(each: Block) -> Block:
        if not isinstance(each.feed_forward, MoE):
            return each
        fields = {f.name: getattr(each.feed_forward, f.name) for f in dataclasses.fields(MoE)}
        return dataclasses.replace(each, feed_forward=RecordingMoE(**fields, choices=choices))

    return DecoderModel(
        dataclasses.replace(model.spec, blocks=tuple(map(block, model.spec.blocks)))
    )


def distinct(
    model: DecoderModel,
    params: Any,
    state: DecodeState,
    batches: Sequence[Any],
    rows: Sequence[int],
    *,
    implementation: Implementation | None = None,
) -> tuple[dict[int, list[int]], DecodeState]:
    """Distinct experts of each layer and batch by the number of rows, and the state.

    A row's experts depend on this row alone, so one pass with the most rows counts all.

    Args:
        batches: `DecodeBatch`es of `max(rows)` rows, one for each step that is counted.
        rows: how many of the first rows are counted.

    Raises:
        RuntimeError: the steps called the experts in another way than `RecordingExperts` watches.
    """
    layers = moe_layers(model)
    if not layers:
        return {count: [] for count in rows}, state
    choices = ExpertChoices()
    step = jit_step(watched(model, choices).decode, implementation=implementation)
    for batch in batches:
        _, state = step(params, state, batch)
    jax.block_until_ready(state)
    jax.effects_barrier()
    if len(choices.seen) != layers * len(batches):
        raise RuntimeError(
            f"{len(choices.seen)} calls of experts were seen in {len(batches)} steps of {layers} "
            "layers with experts; RecordingExperts has to follow MixtureOfExperts"
        )
    return {count: list(_distinct(choices.seen, count)) for count in rows}, state


def _distinct(seen: Sequence[np.ndarray], rows: int) -> Iterator[int]:
    for ids in seen:
        yield len(np.unique(ids[:rows]))


def expected(model: DecoderModel, rows: int) -> float:
    """Distinct experts of a layer if all were equally likely: E (1 - (1 - K / E)^rows)."""
    kinds = [b.feed_forward for b in model.spec.blocks if isinstance(b.feed_forward, MoE)]
    if not kinds:
        return 0.0
    router = kinds[0].router
    return router.experts * (1 - (1 - router.top_k / router.experts) ** rows)
