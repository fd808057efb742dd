"""What `python -m jaxattn.serve` says: the text while it is generated, the plan and the summary."""

import codecs
import importlib.metadata
import platform
import re
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from rich.console import Console

from jaxattn import __version__
from jaxattn.engine.engine import Engine
from jaxattn.engine.request import Completion, FinishReason, Request
from jaxattn.memory.budget import MemoryPlan

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")
MIB = 2**20
# A terminal would obey control characters; all but tab and newline are shown as undecodable.
CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


class TextStream:
    """Prints bytes as text while they are generated, in the order of the requests.

    The first request that is not done flows as it is generated. What the others generate meanwhile
    is kept and printed when those before them are done, so that every text can be read in one
    piece. Of several, each line starts with its request's number. A request's prompt is
    printed before its first token, dim on a terminal.
    """

    def __init__(self, console: Console, requests: Sequence[Request]):
        self._console = console
        self._numbered = len(requests) > 1
        self._turns = deque(request.id for request in requests)
        self._texts: dict[int | None, _Text] = {}
        self._done: set[int | None] = set()

    def token(self, request: Request, token: int) -> None:
        """For `Engine.generate`'s `on_token`."""
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = _Text()
            text.feed(bytes(request.prompt), style="dim")
        text.feed(bytes([token]))
        self._flush()

    def finish(self, completion: Completion) -> None:
        """For `on_finish`: lets the next request flow if this one did."""
        self._done.add(completion.request.id)
        self._flush()

    def close(self) -> None:
        """Prints all that is left, as after Ctrl-C."""
        self._done.update(self._turns)
        self._flush()

    def _flush(self) -> None:
        while self._turns:
            number = self._turns[0]
            text = self._texts.get(number, _Text())
            if number in self._done:
                text.end()
            while text.waiting:
                line, style = text.waiting.popleft()
                if text.line_begins and self._numbered:
                    place = number or 0
                    self._write(f"[{place + 1}] ", COLOURS[place % len(COLOURS)])
                self._write(line, style)
                text.line_begins = line.endswith("\n")
            if number not in self._done:
                return
            self._turns.popleft()
            if not text.line_begins:
                self._write("\n")

    def _write(self, text: str, style: str | None = None) -> None:
        if self._console.quiet:
            return
        if self._console.is_terminal:
            self._console.out(text.translate(CONTROL), style=style, end="", highlight=False)
        else:  # not through rich, which expands tabs
            self._console.file.write(text)
            self._console.file.flush()


class _Text:
    """A request's bytes, decoded, until they are printed.

    Attributes:
        waiting: lines or parts of one, each with its style.
        line_begins: whether what was printed of it ends with a newline.
    """

    def __init__(self) -> None:
        self.waiting: deque[tuple[str, str | None]] = deque()
        self.line_begins = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes, style: str | None = None) -> None:
        self._add(self._decoder.decode(data), style)

    def end(self) -> None:
        """Half a character is left over, and shown as undecodable."""
        self._add(self._decoder.decode(b"", True), None)

    def _add(self, text: str, style: str | None) -> None:
        # Not splitlines, to which other characters than a newline end a line.
        self.waiting.extend((line, style) for line in re.findall(r"[^\n]*\n|[^\n]+", text))


def plan_lines(plan: MemoryPlan) -> Iterable[str]:
    """The memory plan in three lines: its sum, its parts, and what it leaves."""
    yield f"memory plan for {plan.title}: {plan.total:,} bytes in total"
    parts = [f"{item.name} {item.nbytes / MIB:,.2f}" for item in plan.items if item.nbytes]
    yield f"  in MiB: {', '.join(parts)}"
    left = ""
    if plan.budget is not None and plan.reserve is not None:
        left = f"{plan.reserve / MIB:,.2f} MiB of {plan.budget.device} stay free; "
    yield f"  {left}--plan prints every line with its reason"


def summary_lines(
    engine: Engine, completions: Sequence[Completion], measured: dict[str, Any]
) -> Iterable[str]:
    """Each request's end, then tokens a second, planned and measured bytes."""
    for completion in completions:
        number = (completion.request.id or 0) + 1
        if completion.finish_reason == FinishReason.REFUSED:
            yield f"[{number}] refused: {completion.detail}"
            continue
        first = completion.seconds_to_first_token
        when = "" if first is None else f", first token after {first:.2f} s"
        yield f"[{number}] {ending(completion)}{when}"
    stats = engine.stats
    yield (
        f"prompt     {stats.prompt_tokens_per_second:10,.1f} tok/s   {stats.prompt_tokens:,} "
        f"tokens in {stats.prefill_steps} chunks"
    )
    yield (
        f"generated  {stats.decoded_tokens_per_second:10,.1f} tok/s   {stats.decoded_tokens:,} "
        f"tokens in {stats.decode_steps} steps (first tokens come with the prompt)"
    )
    late = ", ".join(f"{count} {kind}" for kind, count in engine.seal.counts.items())
    yield f"after the warm-up: {late or 'nothing traced, compiled or allocated'}"
    yield _bytes_line("planned", engine.plan.inside, "of the plan, in JAX's allocator")
    for name, why in MEASURES.items():
        if name in measured:
            yield _bytes_line("measured", measured[name], why)


def ending(completion: Completion) -> str:
    """How long a text is and why it ends, with the option that cut it if one did."""
    tokens, asked = len(completion.tokens), completion.request.max_tokens
    reason = str(completion.finish_reason)
    if reason == "length":
        length = len(completion.request.prompt) + tokens
        cut = f"--max-tokens {asked}" if tokens == asked else f"--max-model-len {length}"
        reason = f"cut by {cut}"
    return f"{tokens} tokens, {reason}"


MEASURES = {
    "device_bytes_in_use": "in use on the device now: the plan but for XLA's temp and code",
    "device_peak_bytes": "the most at any time, XLA's tuning while it compiled included",
    "live_array_bytes": "JAX arrays alive at the end; no allocator of a CPU tells XLA's temp",
    "process_peak_rss_bytes": "the process at its largest, Python and the compiler included",
}


def measure() -> dict[str, int]:
    """What the process took, as far as the platform can say; names as in `MEASURES`."""
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
    engine: Engine,
    completions: Sequence[Completion],
    measured: dict[str, Any],
    settings: dict[str, Any],
    compile_seconds: dict[str, float],
) -> dict[str, Any]:
    """The whole run as plain values; keys end in their units."""
    stats, device = engine.stats, jax.devices()[0]
    return {
        "requests": [
            {
                "id": completion.request.id,
                "prompt": _text(completion.request.prompt),
                "text": _text(completion.tokens),
                "prompt_tokens": len(completion.request.prompt),
                "generated_tokens": len(completion.tokens),
                "finish_reason": completion.finish_reason,
                "finish_detail": completion.detail,
                "seconds_to_first_token": completion.seconds_to_first_token,
                "seconds": completion.seconds,
            }
            for completion in completions
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
        "measured": measured,
        "after_warm_up": dict(engine.seal.counts),
        "settings": settings,
        "implementations": engine.implementations,
        "device": {"platform": device.platform, "kind": device.device_kind},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide the result."""
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


def _text(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


def _bytes_line(name: str, nbytes: int, why: str) -> str:
    return f"  {name:<30} {nbytes:>16,} B {nbytes / MIB:>10.2f} MiB   {why}".rstrip()
