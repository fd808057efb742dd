"""The summary of `python -m jaxattn.serve` after the text, in lines or as JSON."""

import dataclasses
import importlib.metadata
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxattn import __version__
from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.outputs import Completion, FinishReason
from jaxattn.engine.requests.request import GenerationStats
from jaxattn.memory.plan import MemoryPlan
from jaxattn.text import Tokenizer

MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunReport:
    """The results of a command.

    Attributes:
        completions: The completions of all requests.
        stats: The statistics of all requests together.
        texts: The prompts that the user wrote, by request id. Prompts of bytes may have none.
        measured_bytes: The measured bytes, by the names in `MEASURES`.
    """

    engine: Engine
    tokenizer: Tokenizer
    completions: Sequence[Completion]
    stats: GenerationStats
    texts: Mapping[int, str]
    measured_bytes: dict[str, int]

    @property
    def refused(self) -> bool:
        """Whether the engine refused a request."""
        return any(each.finish_reason == FinishReason.REFUSED for each in self.completions)


def summary_lines(run: RunReport) -> Iterable[str]:
    """Yields the end of each request, then tokens per second, and planned and measured bytes."""
    engine, completions, stats = run.engine, run.completions, run.stats
    measured_bytes = run.measured_bytes
    for completion in completions:
        number = (completion.request.id or 0) + 1
        if completion.finish_reason == FinishReason.REFUSED:
            yield f"[{number}] refused: {completion.detail}"
            continue
        first = completion.seconds_to_first_token
        when = "" if first is None else f", first token after {first:.2f} s"
        yield f"[{number}] {ending(completion)}{when}"
    yield (
        f"prompt     {stats.prompt_tokens_per_second:10,.1f} tok/s   {stats.prompt_tokens:,} "
        f"tokens in {stats.prefill_steps} chunks"
    )
    yield (
        f"generated  {stats.decoded_tokens_per_second:10,.1f} tok/s   {stats.decoded_tokens:,} "
        f"tokens in {stats.decode_steps} steps (prefill generates the first tokens)"
    )
    events_after_warmup = ", ".join(f"{count} {kind}" for kind, count in engine.seal.counts.items())
    yield f"after the warm-up: {events_after_warmup or 'nothing traced, compiled or allocated'}"
    yield _bytes_line("planned", engine.plan.inside, "planned within JAX's allocator")
    for name, description in MEASURES.items():
        if name in measured_bytes:
            yield _bytes_line("measured", measured_bytes[name], description)


def ending(completion: Completion) -> str:
    """Returns the length of a text and the reason of its end, with the option that limited it."""
    tokens, asked = len(completion.tokens), completion.request.max_tokens
    reason = str(completion.finish_reason)
    if reason == "length":
        length = len(completion.request.prompt) + tokens
        cut = f"--max-tokens {asked}" if tokens == asked else f"--max-model-len {length}"
        reason = f"cut by {cut}"
    return f"{tokens} tokens, {reason}"


MEASURES = {
    "device_bytes_in_use": "in use on the device now: the plan without XLA's temp and code",
    "device_peak_bytes": "peak on the device, including XLA's autotuning during compilation",
    "live_array_bytes": "live JAX arrays at the end; a CPU does not report XLA's temp",
    "process_peak_rss_bytes": "peak of the process, including Python and the compiler",
}


def measure() -> dict[str, int]:
    """Returns the memory use that the platform can report, by the names in `MEASURES`."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return {
            "device_bytes_in_use": stats["bytes_in_use"],
            "device_peak_bytes": stats["peak_bytes_in_use"],
        }
    measured = {"live_array_bytes": sum(array.nbytes for array in jax.live_arrays())}
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        usage = resource.getrusage(resource.RUSAGE_SELF)
        measured["process_peak_rss_bytes"] = usage.ru_maxrss * unit
    return measured


def to_json(
    run: RunReport, settings: dict[str, Any], compile_seconds: dict[str, float]
) -> dict[str, Any]:
    """Returns the whole run as JSON values. Keys of quantities end in their units."""
    engine, stats, device = run.engine, run.stats, jax.devices()[0]
    decode = run.tokenizer.decode
    return {
        "requests": [
            {
                "id": completion.request.id,
                "prompt": run.texts.get(completion.request.id or 0)
                or decode(completion.request.prompt),
                "text": decode(completion.tokens),
                "prompt_tokens": len(completion.request.prompt),
                "generated_tokens": len(completion.tokens),
                "finish_reason": completion.finish_reason,
                "finish_detail": completion.detail,
                "seconds_to_first_token": completion.seconds_to_first_token,
                "seconds": completion.seconds,
            }
            for completion in run.completions
        ],
        "timings": {
            "prompt_tokens": stats.prompt_tokens,
            "decoded_tokens": stats.decoded_tokens,
            "prefill_steps": stats.prefill_steps,
            "decode_steps": stats.decode_steps,
            "prompt_tokens_per_second": stats.prompt_tokens_per_second,
            "decoded_tokens_per_second": stats.decoded_tokens_per_second,
            "prefill_seconds": stats.prefill_seconds,
            "seconds": stats.seconds,
            "compile_seconds": compile_seconds,
        },
        "plan": _plan(engine.plan),
        "measured": run.measured_bytes,
        "after_warm_up": dict(engine.seal.counts),
        "settings": settings,
        "implementations": engine.implementations,
        "device": {"platform": device.platform, "kind": device.device_kind},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that determine the result."""
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    return {"python": platform.python_version(), "jaxattn": __version__, **packages}


def _plan(plan: MemoryPlan) -> dict[str, Any]:
    def item_dict(item: Any) -> dict[str, Any]:
        parts = [item_dict(part) for part in item.parts]
        found = {
            "name": item.name,
            "bytes": item.nbytes,
            "why": item.why,
            "basis": item.basis,
        }
        return found | ({"parts": parts} if parts else {})

    return {
        "items": [item_dict(item) for item in plan.items],
        "total_bytes": plan.total,
        "reserve_bytes": plan.reserve,
    }


def _bytes_line(name: str, nbytes: int, description: str) -> str:
    return f"  {name:<30} {nbytes:>16,} B {nbytes / MIB:>10.2f} MiB   {description}".rstrip()
