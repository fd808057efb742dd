"""Steps over several devices, which wait for one another: sent by one thread at a time."""

import threading
from typing import Any

from jaxattn import Limits
from jaxattn.engine.execution.model_runner import ModelRunner
from jaxattn.engine.runtime.recompilation_guard import RecompilationGuard
from jaxattn.engine.steps.batch_update_steps import BatchUpdateStep


def test_threads_send_steps_over_several_devices_in_one_order():
    """Two engines of two threads would else wait for one another's steps, each on its device."""
    inside, go_on, sent = threading.Event(), threading.Event(), list[str]()

    def slow(rows: Any, packed: Any) -> None:
        sent.append("begins")
        inside.set()
        assert go_on.wait(30)
        sent.append("ends")

    def quick(rows: Any, packed: Any) -> None:
        sent.append("other")

    def update(step: Any, group: Any) -> threading.Thread:
        runner: Any = ModelRunner(
            Limits(), {str(BatchUpdateStep()): step}, (), None, None, RecompilationGuard(), group
        )  # type: ignore[arg-type]
        thread = threading.Thread(target=runner.update, args=(None,))
        thread.start()
        return thread

    first = update(slow, object())
    assert inside.wait(30)
    alone = update(quick, None)
    alone.join(30)
    assert sent == ["begins", "other"]  # a step on one device waits for no other's
    second = update(quick, object())
    second.join(0.2)
    assert sent == ["begins", "other"]
    go_on.set()
    for thread in (first, second):
        thread.join(30)
    assert sent == ["begins", "other", "ends", "other"]
