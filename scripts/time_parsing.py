"""The time that parsing of reasoning and tool calls adds between tokens, with many streams.

    python -m scripts.time_parsing [RESULT.json] [--streams N]

Each stream gets a token of about four characters per step, each at a different position in a
message of reasoning, text and a long call. A step's time is that of all parsers together: one loop
serves all streams, so the last stream waits for the others. Steps are the same in each run, and the
minimum CPU time over several runs counts, because other programs disturb single runs. The result
contains percentiles over steps in milliseconds, for the parsers and for plain events without a
parser, and their difference.
"""

import argparse
import gc
import json
import random
import time
from collections.abc import Callable

from jaxattn.server.decoding.message_events import ContentDelta, MessageParser, ToolCall
from jaxattn.server.decoding.message_format import FORMATS, MessageFormat
from jaxattn.server.decoding.tool_choice import ToolChoice

TOOL = {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}
RUNS = 5
CHOICE = ToolChoice(tools=(TOOL,), functions=(TOOL,))
PROSE = "Let me look at the file first, and then change one line of it. " * 20
CODE = "".join(f"def f{n}(x):\n    if x < {n}:\n        return [x, {n}]\n" for n in range(150))
ARGUMENTS = json.dumps({"path": "a.py", "text": CODE})
VALUES = {
    "qwen3_coder": "<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n"
    f"<parameter=text>\n{CODE}\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>\n"
    f"<arg_key>text</arg_key>\n<arg_value>{CODE}</arg_value>\n</tool_call>",
}


def message(name: str) -> str:
    """A whole message in one format."""
    frame = FORMATS[name].frame
    before = frame.call_begin.replace("NAME", "write").replace("INDEX", "0")
    call = VALUES.get(name) or f"{frame.begin}{before}{ARGUMENTS}{frame.call_end}{frame.end}"
    if name == "harmony":
        begin, final = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
        start = "<|end|><|start|>assistant"
        return f"{begin}{PROSE}{start}{final}{PROSE}{start}{call}<|call|>"
    return f"<think>\n{PROSE}\n</think>\n\n{'' if name == 'llama3' else PROSE}{call}"


class PlainEvents:
    """A stand-in without parsing: each piece of text is content."""

    def feed(self, text: str) -> list[ContentDelta]:
        return [ContentDelta(text)]


def step_times(
    text: str, streams: int, make: Callable[[], MessageParser | PlainEvents]
) -> list[float]:
    """Sorted CPU seconds of the steps; each is the minimum over several runs of the same step."""
    luck, tokens = random.Random(0), list[str]()
    while text:
        length = luck.choice((1, 2, 3, 4, 5, 6, 7))
        tokens.append(text[:length])
        text = text[length:]
    runs = [_steps(tokens, streams, make) for _ in range(RUNS)]
    return sorted(map(min, zip(*runs, strict=True)))


def _steps(
    tokens: list[str], streams: int, make: Callable[[], MessageParser | PlainEvents]
) -> list[float]:
    count, found = len(tokens), list[float]()
    begins = [stream * count // streams for stream in range(streams)]
    parsers = [make() for _ in range(streams)]
    for parser, begin in zip(parsers, begins, strict=True):
        for token in tokens[:begin]:
            parser.feed(token)
    gc.disable()
    for step in range(count):
        start = time.thread_time()
        for stream in range(streams):
            at = begins[stream] + step
            if at == count:
                parsers[stream] = make()
            parsers[stream].feed(tokens[at % count])
        found.append(time.thread_time() - start)
    gc.enable()
    return found


def percentiles(times: list[float]) -> dict[str, float]:
    return {
        f"p{percent}": round(1e3 * times[min(len(times) - 1, len(times) * percent // 100)], 4)
        for percent in (50, 99)
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("result", nargs="?")
    options.add_argument("--streams", type=int, default=128)
    given = options.parse_args()
    rows = {}
    for name in FORMATS:
        format_, text = MessageFormat.of("", name), message(name)
        parser, parts = format_.parser(CHOICE), list[object]()
        parts += [*parser.feed(text), *parser.finish()]
        assert any(isinstance(part, ToolCall) for part in parts), name
        parsed = percentiles(step_times(text, given.streams, lambda: format_.parser(CHOICE)))  # noqa: B023
        plain = percentiles(step_times(text, given.streams, PlainEvents))
        added = {key: round(parsed[key] - plain[key], 4) for key in parsed}
        rows[name] = {"parsed_ms": parsed, "plain_ms": plain, "added_ms": added}
        print(f"{name:14} parsed {parsed}  plain {plain}  added {added}", flush=True)
    if given.result:
        with open(given.result, "w") as file:
            json.dump({"streams": given.streams, "formats": rows}, file, indent=1)


if __name__ == "__main__":
    main()
