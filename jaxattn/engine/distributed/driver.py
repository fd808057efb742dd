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

    process_group: ProcessGroup

    @classmethod
    def of(cls, runner: ModelRunner, process_group: ProcessGroup) -> "DriverRunner":
        driver = cls(
            runner.limits,
            runner.executables,
            runner.weights,
            runner.state,
            runner.rows,
            runner.seal,
            runner.group,
        )
        driver.process_group = process_group
        return driver

    def update(self, packed: np.ndarray) -> None:
        self._broadcast(UPDATE, packed)
        self.process_group.begin()
        super().update(packed)
        self.process_group.sent()

    def prefill(
        self,
        entry: ModelStep,
        packed: np.ndarray,
        *,
        score_targets: Sequence[np.ndarray] = (),
        pooled: Sequence[np.ndarray] = (),
    ) -> tuple[jax.Array, list[jax.Array]]:
        self._broadcast(PREFILL, packed, entry.tokens, len(score_targets), len(pooled))
        for each in (*score_targets, *pooled):
            self._broadcast(WANTED, each)
        self.process_group.begin()
        found = super().prefill(entry, packed, score_targets=score_targets, pooled=pooled)
        self.process_group.sent()
        return found

    def remember(self, tokens: int, packed: np.ndarray) -> None:
        self._broadcast(REMEMBER, packed, tokens)
        self.process_group.begin()
        super().remember(tokens, packed)
        self.process_group.sent()

    def copy(self, source: int, target: int) -> None:
        self._broadcast(COPY, np.array([source, target], np.int32))
        self.process_group.begin()
        super().copy(source, target)
        self.process_group.sent()

    def first(
        self,
        logits: jax.Array,
        row_indices: np.ndarray,
        level: SamplingMode,
        bitmask: np.ndarray | None,
    ) -> jax.Array:
        self._broadcast(FIRST, row_indices, int(level), int(bitmask is not None))
        self.process_group.begin()
        if bitmask is not None:
            self._broadcast(MASKS, bitmask)
        told = super().first(logits, row_indices, level, bitmask)
        self.process_group.sent(told)
        return told

    def decode(
        self,
        row_indices: np.ndarray,
        level: SamplingMode,
        make_bitmask: Callable[[int], np.ndarray] | None = None,
        steps: int = 1,
        drafts: bool = True,
    ) -> jax.Array:
        assert steps == 1, "several devices run one step at a time"
        self._broadcast(DECODE, row_indices, int(level), int(make_bitmask is not None))
        self.process_group.begin()
        masks = make_bitmask and functools.partial(self._broadcast_masks, make_bitmask)
        told = super().decode(row_indices, level, masks)
        self.process_group.sent(told)
        return told

    def _broadcast_masks(self, make_bitmask: Callable[[int], np.ndarray], lines: int) -> np.ndarray:
        found = make_bitmask(lines)
        self._broadcast(MASKS, found)
        return found

    def forget(self) -> None:
        self._broadcast(FORGET)
        super().forget()

    def delete(self) -> None:
        self.process_group.close()
        super().delete()

    def _broadcast(self, kind: int, array: np.ndarray | None = None, *numbers: int) -> None:
        if self.process_group.closed:
            return
        for link in self.process_group.links:
            link.send(kind, array, *numbers)


def run_worker_loop(runner: ModelRunner, process_group: ProcessGroup) -> None:
    """Sends the leader's steps to this process's devices, until the leader closes its engine.

    Raises:
        HostError: The leader is gone.
    """
    logits: Any = None
    [link] = process_group.links
    while True:
        kind, array, numbers = link.receive()
        outputs = None
        if kind == END:
            process_group.close()
            return
        if kind == FORGET:
            runner.forget()
            continue
        assert array is not None, "every other message has an array"
        process_group.begin()
        if kind == UPDATE:
            runner.update(array)
        elif kind == COPY:
            runner.copy(*array.tolist())
        elif kind == PREFILL:
            tokens, *counts = numbers[-3:]
            wanted, pooled = ([_array(link, WANTED) for _ in range(count)] for count in counts)
            entry = prefill_step(runner.limits, tokens)
            logits, _ = runner.prefill(entry, array, score_targets=wanted, pooled=pooled)
        elif kind == REMEMBER:
            runner.remember(numbers[-1], array)
        elif kind == FIRST:
            *_, level, masked = numbers
            outputs = runner.first(
                logits, array, SamplingMode(level), _array(link, MASKS) if masked else None
            )
        elif kind == DECODE:
            *_, level, masked = numbers
            words = (lambda lines: _array(link, MASKS)) if masked else None
            outputs = runner.decode(array, SamplingMode(level), words)
        process_group.sent(outputs)


def _array(link: TransportLink, expected_kind: int) -> np.ndarray:
    """Receives an array that belongs to a step: masks before it samples, or the tokens to score."""
    kind, array, _ = link.receive()
    if kind != expected_kind or array is None:
        raise HostError(
            f"{link.name} sent message {kind}, but message {expected_kind} was expected"
        )
    return array
