"""The driver of an engine over several processes, and the workers that send the same steps.

After `jax.distributed.initialize`, every process creates the same engine over the devices of all
processes, and warms it up. Then the leader takes requests. Before it sends a step to its devices,
it sends the step's inputs to the other processes. A follower has no scheduler: it runs the leader's
steps in the leader's order, and reads no token.

    leader    crew = ProcessGroup.leading("0.0.0.0:9876", processes=2)
              engine.lead(crew)
    others    crew = ProcessGroup.following("host-0:9876", 1)
              engine.follow(crew)

`follow` returns when the leader closes its engine. process_group.py explains how all of them end.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxattn.engine.distributed.process_group import ProcessGroup
from jaxattn.engine.distributed.transport import (
    COPY,
    DECODE,
    END,
    FIRST,
    FORGET,
    MASKS,
    PREFILL,
    REMEMBER,
    UPDATE,
    WANTED,
    HostError,
    TransportLink,
)
from jaxattn.engine.execution.model_runner import ModelRunner
from jaxattn.engine.sampling.sampler import SamplingMode
from jaxattn.engine.steps.model_steps import ModelStep
from jaxattn.engine.steps.step_catalog import prefill_step


class DriverRunner(ModelRunner):
    """A runner that first sends the inputs of its steps to the other processes."""

    crew: ProcessGroup

    @classmethod
    def of(cls, runner: ModelRunner, crew: ProcessGroup) -> "DriverRunner":
        found = cls(
            runner.limits,
            runner.executables,
            runner.weights,
            runner.state,
            runner.rows,
            runner.seal,
            runner.group,
        )
        found.crew = crew
        return found

    def update(self, packed: np.ndarray) -> None:
        self._broadcast(UPDATE, packed)
        self.crew.begin()
        super().update(packed)
        self.crew.sent()

    def prefill(
        self,
        entry: ModelStep,
        packed: np.ndarray,
        *,
        wanted: Sequence[np.ndarray] = (),
        pooled: Sequence[np.ndarray] = (),
    ) -> tuple[jax.Array, list[jax.Array]]:
        self._broadcast(PREFILL, packed, entry.tokens, len(wanted), len(pooled))
        for each in (*wanted, *pooled):
            self._broadcast(WANTED, each)
        self.crew.begin()
        found = super().prefill(entry, packed, wanted=wanted, pooled=pooled)
        self.crew.sent()
        return found

    def remember(self, tokens: int, packed: np.ndarray) -> None:
        self._broadcast(REMEMBER, packed, tokens)
        self.crew.begin()
        super().remember(tokens, packed)
        self.crew.sent()

    def copy(self, source: int, target: int) -> None:
        self._broadcast(COPY, np.array([source, target], np.int32))
        self.crew.begin()
        super().copy(source, target)
        self.crew.sent()

    def first(
        self, logits: jax.Array, places: np.ndarray, level: SamplingMode, words: np.ndarray | None
    ) -> jax.Array:
        self._broadcast(FIRST, places, int(level), int(words is not None))
        self.crew.begin()
        if words is not None:
            self._broadcast(MASKS, words)
        told = super().first(logits, places, level, words)
        self.crew.sent(told)
        return told

    def decode(
        self,
        places: np.ndarray,
        level: SamplingMode,
        words: Callable[[int], np.ndarray] | None = None,
        steps: int = 1,
        drafts: bool = True,
    ) -> jax.Array:
        assert steps == 1, "several devices run one step at a time"
        self._broadcast(DECODE, places, int(level), int(words is not None))
        self.crew.begin()
        masks = words and functools.partial(self._broadcast_masks, words)
        told = super().decode(places, level, masks)
        self.crew.sent(told)
        return told

    def _broadcast_masks(self, words: Callable[[int], np.ndarray], lines: int) -> np.ndarray:
        found = words(lines)
        self._broadcast(MASKS, found)
        return found

    def forget(self) -> None:
        self._broadcast(FORGET)
        super().forget()

    def delete(self) -> None:
        self.crew.close()
        super().delete()

    def _broadcast(self, kind: int, array: np.ndarray | None = None, *numbers: int) -> None:
        if self.crew.closed:
            return
        for link in self.crew.links:
            link.send(kind, array, *numbers)


def run_worker_loop(runner: ModelRunner, crew: ProcessGroup) -> None:
    """Sends the leader's steps to this process's devices, until the leader closes its engine.

    Raises:
        HostError: The leader is gone.
    """
    logits: Any = None
    [link] = crew.links
    while True:
        kind, array, numbers = link.receive()
        told = None
        if kind == END:
            crew.close()
            return
        if kind == FORGET:
            runner.forget()
            continue
        assert array is not None, "every other message has an array"
        crew.begin()
        if kind == UPDATE:
            runner.update(array)
        elif kind == COPY:
            runner.copy(*array.tolist())
        elif kind == PREFILL:
            tokens, *counts = numbers[-3:]
            wanted, pooled = ([_array(link, WANTED) for _ in range(count)] for count in counts)
            entry = prefill_step(runner.limits, tokens)
            logits, _ = runner.prefill(entry, array, wanted=wanted, pooled=pooled)
        elif kind == REMEMBER:
            runner.remember(numbers[-1], array)
        elif kind == FIRST:
            *_, level, masked = numbers
            told = runner.first(
                logits, array, SamplingMode(level), _array(link, MASKS) if masked else None
            )
        elif kind == DECODE:
            *_, level, masked = numbers
            words = (lambda lines: _array(link, MASKS)) if masked else None
            told = runner.decode(array, SamplingMode(level), words)
        crew.sent(told)


def _array(link: TransportLink, due: int) -> np.ndarray:
    """Receives an array that belongs to a step: masks before it samples, or the tokens to score."""
    kind, array, _ = link.receive()
    if kind != due or array is None:
        raise HostError(f"{link.name} sent message {kind}, but message {due} was expected")
    return array
