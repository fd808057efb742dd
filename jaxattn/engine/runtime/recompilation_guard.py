"""The recompilation guard: after the warm-up, no trace, compilation, tuning or new buffer.

JAX announces every trace, lowering and compilation before it begins (`jax.monitoring`). While a
thread is inside `RecompilationGuard.watch`, the guard counts these for its engine, or in strict
mode refuses them before they start. Tuning happens inside a compilation, so it is refused too. The
guard ignores other threads and other engines.

Buffers: the engine's own must keep the addresses that they had when it was sealed, and a step may
leave no other buffers behind. In strict mode, a thread inside `watch` can run and copy something on
the device only inside `allowed`, so no buffer can appear. (The error may call such a refusal a
trace, since JAX looks for the executable again.) Otherwise the guard counts the process's arrays
before and after, including those of other threads. Counting takes longer than a small model's step,
so only one `watch` in 256 does it, beginning with the first. A leak in every step is still found.
"""

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxattn.engine.runtime.process_state import PROCESS_STATE

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compilation",
}

# Parts of JAX's error messages about the refusals of `_nothing_runs`.
_REFUSALS = ("no_execution", "Disallowed host-to-device transfer")


# One `watch` in this many counts arrays.
COUNTS_EVERY = 256


class SealError(RuntimeError):
    """Something was traced, compiled or allocated after the warm-up."""


class RecompilationGuard:
    """The record of traces, compilations and allocations after the warm-up.

    Args:
        strict: Whether to raise SealError at once, instead of counting.

    Attributes:
        counts: The number of events by kind: "trace", "lowering", "compilation", "buffer".
        messages: A description of each event.
    """

    def __init__(self, *, strict: bool = False):
        self.strict = strict
        self.counts: collections.Counter[str] = collections.Counter()
        self.messages: list[str] = []
        self._watched = 0
        self._addresses: Sequence[int] = ()
        PROCESS_STATE.listen(_on_event)

    @property
    def counts_next(self) -> bool:
        """Whether the next `watch` counts arrays, which no step in flight may own."""
        return not self.strict and self._watched % COUNTS_EVERY == 0

    @contextlib.contextmanager
    def watch(self, *, buffers: bool = True) -> Iterator[None]:
        """Counts what this thread traces, compiles or allocates inside.

        Args:
            buffers: Whether to check for buffers that are left behind.
        """
        outer = PROCESS_STATE.seal
        PROCESS_STATE.seal = self
        counts = buffers and self.counts_next
        self._watched += buffers
        try:
            if self.strict:
                with _nothing_runs(True):
                    yield
            elif counts:
                before = len(jax.live_arrays())
                yield
                if (more := len(jax.live_arrays()) - before) > 0:
                    self.note("buffer", f"{more} more live array(s) than before the step")
            else:
                yield
        except RuntimeError as error:
            if isinstance(error, SealError) or not any(text in str(error) for text in _REFUSALS):
                raise
            self.note("buffer", str(error))
        finally:
            PROCESS_STATE.seal = outer

    def allowed(self) -> contextlib.AbstractContextManager[None]:
        """Allows the engine's own executables to run inside of it, within `watch`."""
        return _nothing_runs(False) if self.strict else contextlib.nullcontext()

    def hold(self, tree: Any) -> None:
        """Records the buffers with which `check` compares. The next `watch` counts arrays."""
        self._addresses, self._watched = _addresses(tree), 0

    def check(self, tree: Any) -> None:
        """Notes every buffer that is not where it was at `hold`."""
        now = _addresses(tree)
        if now != self._addresses:
            leaves = [
                jax.tree_util.keystr(path)
                for path, leaf in jax.tree.leaves_with_path(tree)
                for _ in _addresses(leaf)
            ]
            moved = [
                name
                for name, old, new in zip(leaves, self._addresses, now, strict=False)
                if old != new
            ]
            self._addresses = now
            self.note("buffer", f"new buffer of {', '.join(moved) or 'another structure'}")

    def note(self, kind: str, message: str) -> None:
        """Counts an event; in strict mode raises SealError."""
        self.counts[kind] += 1
        self.messages.append(f"{kind}: {message}")
        if self.strict:
            raise SealError(
                f"{kind} after the engine was sealed: {message}; a step may use only the "
                "executables that warm-up compiled"
            )


@contextlib.contextmanager
def _nothing_runs(refused: bool) -> Iterator[None]:
    """Refuses or allows this thread's executions and its copies to a device."""
    transfers = "disallow_explicit" if refused else "allow"
    with jax.no_execution(refused), jax.transfer_guard_host_to_device(transfers):
        yield


def _addresses(tree: Any) -> list[int]:
    found = []
    for leaf in jax.tree.leaves(tree):
        if leaf.size and len(leaf.sharding.device_set) == 1:
            found.append(leaf.unsafe_buffer_pointer())
        elif leaf.size:
            found += [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]
    return found


def _on_event(event: str, value: float | int, **details: Any) -> None:
    seal = PROCESS_STATE.seal
    if seal is not None and event in EVENTS:
        seal.note(EVENTS[event], str(details.get("fun_name", "")))
