"""The device's side of an engine: what its steps run on, and sending them without waiting."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxattn.engine.rows import Places, Rows
from jaxattn.engine.sampling import Level
from jaxattn.engine.seal import Seal
from jaxattn.engine.steps import EntryPoint, Remember, Sample, Update, sampled_rows
from jaxattn.memory.limits import Limits
from jaxattn.models.base import DecodeState
from jaxattn.parallel import Group


@dataclasses.dataclass(eq=False)
class Runner:
    """Sends steps. All of them run in the order in which they are sent.

    Attributes:
        executables: name -> compiled step.
        weights: the leaves of the packed parameters.
        state: arena and caches, donated to each of the model's steps.
        rows: of the device, donated to each step that changes them.
        group: of devices that run the steps; None is JAX's default device.
    """

    limits: Limits
    executables: Mapping[str, Any]
    weights: tuple[jax.Array, ...]
    state: DecodeState
    rows: Rows
    seal: Seal
    group: Group | None = None

    def __post_init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._places: jax.Array | None = None
        self._placed: np.ndarray | None = None

    @property
    def lost(self) -> bool:
        """Whether an interrupt between a step's call and its return left donated buffers behind."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves((self.state, self.rows)))

    def update(self, packed: np.ndarray) -> None:
        """Rows that come, and pages: of `Deltas.drain`."""
        with self.seal.allowed():
            self.rows = self._sent(self._step(Update())(self.rows, packed))

    def prefill(self, entry: EntryPoint, packed: np.ndarray, *, remember: bool) -> jax.Array:
        """Reads chunks of prompts, of `packed_chunks`; gives the logits behind them.

        Args:
            remember: some of the rows have a history.
        """
        with self.seal.allowed():
            logits, self.state = self._sent(self._step(entry)(self.weights, self.state, packed))
            if remember:
                remembered = self._step(Remember(entry.rows, entry.tokens))(self.rows, packed)
                self.rows = self._sent(remembered)
        return logits

    def first(self, logits: jax.Array, places: np.ndarray, level: Level) -> jax.Array:
        """Samples rows that have read their prompts; `places` has -1 for others' logits."""
        with self.seal.allowed():
            return self._sample(logits, places, level)

    def decode(self, places: np.ndarray, level: Level) -> jax.Array:
        """Decodes the rows at `places`, and samples them. What comes back is on its way."""
        bucket = sampled_rows(self.limits, len(places))
        entry = EntryPoint("decode", bucket, 1)
        with self.seal.allowed():
            on_device = self._on_device(places, bucket)
            batch = Places(self.rows, on_device)
            logits, self.state = self._sent(self._step(entry)(self.weights, self.state, batch))
            return self._sample(logits, on_device, level)

    def forget(self) -> None:
        """Lets go of what it holds beside state and rows."""
        self._places = self._placed = None

    def check(self) -> None:
        """Compares the buffers with those that were sealed."""
        self.seal.check((self.state, self.rows))

    def delete(self) -> None:
        """Gives the memory of state and rows back."""
        self.forget()
        for leaf in jax.tree.leaves((self.state, self.rows)):
            leaf.delete()

    def _sample(self, logits: jax.Array, places: Any, level: Level) -> jax.Array:
        step = self._step(Sample(len(places), level))
        self.rows, told = self._sent(step(self.rows, logits, places))
        told.copy_to_host_async()
        return told

    def _sent[Result](self, result: Result) -> Result:
        """What a step gives. Virtual devices of a CPU wait for one another for ever where several
        steps are under way: there a step ends before the next is sent."""
        if self.group is not None and jax.default_backend() == "cpu":
            jax.block_until_ready(result)
        return result

    def _on_device(self, places: np.ndarray, bucket: int) -> jax.Array:
        """The places with padding; they stay on the device until rows come or go."""
        if self._placed is None or not np.array_equal(places, self._placed):
            padded = np.full(bucket, -1, np.int32)
            padded[: len(places)] = places
            whole = PartitionSpec()
            on_all = self.group.put(padded, whole) if self.group else jax.device_put(padded)
            self._places, self._placed = on_all, places
        assert self._places is not None
        return self._places

    def _step(self, step: Any) -> Any:
        """The executable of a step; to make a name takes longer than to look one up."""
        name = self._names.get(step)
        if name is None:
            name = self._names[step] = str(step)
        return self.executables[name]
