"""After the warm-up nothing is traced, compiled or tuned, and no buffer comes to stay.

JAX announces every trace, lowering and compilation before it begins (`jax.monitoring`). While a
thread is inside `RecompilationGuard.watch` they belong to that seal's engine: counted, or in strict
mode refused before they start. Tuning happens inside a compilation, so it is refused with it. What
other threads and other engines compile meanwhile is theirs.

Buffers: the engine's own must stay at the addresses that they had when it was sealed, and a step
may leave no other behind. In strict mode a thread inside `watch` runs and copies nothing on the
device but inside `allowed`, so that no buffer can come to be (what is refused may be called a
trace, since JAX looks for its executable anew). Otherwise the process's arrays are counted before
and after, with those that other threads make meanwhile. To count them takes longer than a small
model's step, so one `watch` in 256 does, the first among them: what every step leaves behind is
found, and costs no step its time.
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

# What JAX says of what `_nothing_runs` refuses.
_REFUSALS = ("no_execution", "Disallowed host-to-device transfer")


# One `watch` in so many counts arrays.
COUNTS_EVERY = 256


class SealError(RuntimeError):
    """Something was traced, compiled or allocated that the warm-up should have done."""


class RecompilationGuard:
    """What happened after the warm-up that should not have.

    Args:
        strict: raise SealError at once; otherwise count.

    Attributes:
        counts: "trace", "lowering", "compilation", "buffer" -> how many.
        what: the name of each.
    """

    def __init__(self, *, strict: bool = False):
        self.strict = strict
        self.counts: collections.Counter[str] = collections.Counter()
        self.what: list[str] = []
        self._watched = 0
        self._addresses: Sequence[int] = ()
        PROCESS_STATE.listen(_on_event)

    @property
    def counts_next(self) -> bool:
        """Whether the next `watch` counts arrays: of a step in flight none may be among them."""
        return not self.strict and self._watched % COUNTS_EVERY == 0

    @contextlib.contextmanager
    def watch(self, *, buffers: bool = True) -> Iterator[None]:
        """What this thread traces, compiles or allocates inside counts.

        Args:
            buffers: False: it may leave buffers behind.
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
                    self.note("buffer", f"{more} array(s) more than before the step")
            else:
                yield
        except RuntimeError as error:
            if isinstance(error, SealError) or not any(text in str(error) for text in _REFUSALS):
                raise
            self.note("buffer", str(error))
        finally:
            PROCESS_STATE.seal = outer

    def allowed(self) -> contextlib.AbstractContextManager[None]:
        """Inside of it the engine's own executables run, inside of `watch`."""
        return _nothing_runs(False) if self.strict else contextlib.nullcontext()

    def hold(self, tree: Any) -> None:
        """These are the buffers; `check` compares with them. The next `watch` counts."""
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

    def note(self, kind: str, what: str) -> None:
        """Counts it; in strict mode raises SealError."""
        self.counts[kind] += 1
        self.what.append(f"{kind}: {what}")
        if self.strict:
            raise SealError(
                f"{kind} after the engine was sealed: {what}; everything a step needs must be "
                "among the executables that were warmed up"
            )


@contextlib.contextmanager
def _nothing_runs(refused: bool) -> Iterator[None]:
    """Whether this thread's executions, and its copies to a device, are refused."""
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
