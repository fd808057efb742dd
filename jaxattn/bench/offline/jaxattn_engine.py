"""The jaxattn engine with default options and random weights, as an `OfflineEngine`."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxattn import Engine, Request, __version__
from jaxattn.bench.harness.device_info import device_facts
from jaxattn.bench.model.model_lookup import find
from jaxattn.bench.model.random_weights import random_params
from jaxattn.bench.offline.measures import MeasureError
from jaxattn.bench.offline.workload import OfflineRequest
from jaxattn.cli.startup.engine_startup import choose_device
from jaxattn.engine.requests.outputs import Completion, FinishEvent, FinishReason, TokenEvent
from jaxattn.engine.runtime.gc_pause import gc_paused
from jaxattn.engine.startup.limits_search import UTILIZATION

SHOWN = (
    "batch", "max_model_len", "num_pages", "prefill_chunk", "prefill_rows", "prefill_tokens",
    "mixed_tokens", "checkpoints", "utilization", "decode_buckets", "prefill_buckets",
    "steps_per_round",
)  # fmt: skip


class JaxattnEngine:
    """`jaxattn.Engine` with default options.

    Args:
        folder: A folder with a config.json.
    """

    name = "jaxattn"

    def __init__(self, folder: str) -> None:
        on_cpu = jax.config.jax_platforms == "cpu"
        choose_device("auto", None, None if on_cpu else UTILIZATION)  # the memory share of `serve`
        model = find(folder)[2]
        self._engine = Engine(model, random_params(model))
        self._engine.start()
        self.vocab_size, self.longest = model.vocab_size, self._engine.limits.longest_row

    def generate(self, requests: Sequence[OfflineRequest]) -> None:
        for completion in self._engine.generate(map(_request, requests)):
            check_length(completion)

    def steps(self, requests: Sequence[OfflineRequest]) -> Iterator[list[int]]:
        engine, ours = self._engine, dict[int | None, int]()
        for place, request in enumerate(requests):
            ours[engine.add(_request(request))] = place
        while engine.busy:
            with gc_paused():
                events = engine.step()
            for event in events:
                if isinstance(event, FinishEvent):
                    check_length(event.completion)
            yield [ours[event.request.id] for event in events if isinstance(event, TokenEvent)]

    def facts(self) -> dict[str, Any]:
        limits = dataclasses.asdict(self._engine.limits)
        return {
            "version": __version__,
            **device_facts(),
            "options": {name: limits[name] for name in SHOWN},
            "sealed": "; ".join(self._engine.seal.messages) or "yes",
        }

    def memory(self) -> dict[str, float]:
        """The planned bytes in JAX's allocator, and its peak if the device reports one."""
        found = {"planned": self._engine.plan.inside / 1e9}
        stats = jax.devices()[0].memory_stats() or {}
        if peak := stats.get("peak_bytes_in_use"):
            found["peak"] = peak / 1e9
        return found


def _request(request: OfflineRequest) -> Request:
    return Request(request.prompt, max_tokens=request.answer)


def check_length(completion: Completion) -> None:
    """Raises a `MeasureError` if the engine did not generate all tokens of a request."""
    wanted, got = completion.request.max_tokens, len(completion.tokens)
    if completion.finish_reason != FinishReason.LENGTH or got != wanted:
        said = f": {completion.detail}" if completion.detail else ""
        raise MeasureError(
            f"a request for {wanted} tokens generated {got} ({completion.finish_reason}{said})"
        )
