"""Counts of the distinct experts that a decode step uses, from a separate pass that is not timed.

The module rebuilds the model from blocks that compute the same and report the choices of their
routers. The rebuilt model takes the same parameters and the same state.
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
    """A recorder of the chosen experts: int32 [T, K] per call of an MoE layer."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def __call__(self, ids: Any) -> None:
        self.seen.append(np.asarray(ids))


class RecordingExperts(MixtureOfExperts):
    """A `MixtureOfExperts` that reports each call's experts to `choices`."""

    choices: ExpertChoices

    def choose(self, logits: Float[Array, "T N"], *args: Any, **options: Any) -> Any:
        return self._told(super().choose(logits, *args, **options))

    def open(self, tokens: Any, *args: Any, **options: Any) -> Any:
        return self._told(super().open(tokens, *args, **options))

    def _told(self, found: Any) -> Any:
        """Returns `found`, whose first item holds the expert ids, after reporting these."""
        jax.debug.callback(self.choices, found[0][:, : self.config.top_k])
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordingMoE(MoE):
    """An `MoE` block that builds `RecordingExperts`."""

    choices: ExpertChoices

    def build(self, stream: Stream, rngs: nnx.Rngs) -> MixtureOfExperts:
        module = super().build(stream, rngs)
        module.__class__ = RecordingExperts  # independent of the arguments that the block passes
        module.choices = self.choices  # type: ignore[attr-defined]
        return module


def moe_layers(model: DecoderModel) -> int:
    return sum(isinstance(block.feed_forward, MoE) for block in model.spec.blocks)


def watched(model: DecoderModel, choices: ExpertChoices) -> DecoderModel:
    """The same model with recording experts; its parameters have the same shapes."""

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
    """Returns the distinct experts per layer and batch, by number of rows, and the state.

    A row's experts do not depend on other rows, so one pass with the most rows gives all counts.

    Args:
        batches: `DecodeBatch`es of `max(rows)` rows, one for each counted step.
        rows: Numbers of rows; each count covers that many first rows.

    Raises:
        RuntimeError: the steps called the experts in a way that `RecordingExperts` does not record.
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
            f"{len(choices.seen)} calls of experts were recorded in {len(batches)} steps of "
            f"{layers} layers with experts; RecordingExperts must match MixtureOfExperts"
        )
    return {count: list(_distinct(choices.seen, count)) for count in rows}, state


def _distinct(seen: Sequence[np.ndarray], rows: int) -> Iterator[int]:
    for ids in seen:
        yield len(np.unique(ids[:rows]))


def expected(model: DecoderModel, rows: int) -> float:
    """Expected distinct experts of a layer under uniform routing: E (1 - (1 - K / E)^rows)."""
    kinds = [b.feed_forward for b in model.spec.blocks if isinstance(b.feed_forward, MoE)]
    if not kinds:
        return 0.0
    router = kinds[0].router
    return router.experts * (1 - (1 - router.top_k / router.experts) ** rows)
