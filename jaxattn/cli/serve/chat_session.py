"""A conversation in the terminal: lines of stdin are turns, and answers appear as they are written,
their thoughts dim.

It ends with stdin or at Ctrl-C. The whole history is sent with each turn. When it grows beyond the
model length, its oldest turns are dropped, and that is said.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rich.console import Console

from jaxattn.cli.exit_codes import code_of, interrupts_raised
from jaxattn.cli.serve.request_inputs import RequestFactory, in_template, user
from jaxattn.cli.serve.text_stream import StyledText, TextPrinter
from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.outputs import Completion, FinishReason, GenerationInterrupted
from jaxattn.engine.requests.request import GenerationStats, Request


def turns(stdin: TextIO, *, asks: bool) -> Iterator[str]:
    """The lines of stdin that say something.

    Args:
        asks: a terminal shows where to type, and lines can be edited.
    """
    lines = _asked() if asks else (line.rstrip("\n") for line in stdin)
    return (line for line in lines if line.strip())


def _asked() -> Iterator[str]:
    with contextlib.suppress(ImportError):  # not every system has it
        import readline  # noqa: F401  # from here on input() edits lines
    while True:
        try:
            yield input("> ")
        except BaseException as ended:
            print()  # what comes next begins on a line of its own
            if isinstance(ended, EOFError):
                return
            raise


@dataclasses.dataclass(kw_only=True)
class Conversation:
    """A chat with one engine.

    Attributes:
        history: the messages so far, system prompt and answers too.
        texts: what the user wrote, by the number of the answer's request.
        completions: the answers.
        stats: of all answers together.
        interrupted: the exit code that Ctrl-C or SIGTERM asked for, or None.
    """

    engine: Engine
    requests: RequestFactory
    printer: TextPrinter
    messages: Console
    history: list[dict[str, str]]
    texts: dict[int, str] = dataclasses.field(default_factory=dict)
    completions: list[Completion] = dataclasses.field(default_factory=list)
    stats: GenerationStats = dataclasses.field(default_factory=GenerationStats)
    interrupted: int | None = None

    def hold(self, lines: Iterator[str]) -> None:
        """Answers every line until there are no more, or until Ctrl-C."""
        try:
            with interrupts_raised() as asked:
                for line in lines:
                    self.answer(line, asked.check)
                    asked.check()
        except GenerationInterrupted as ended:
            self._end(ended.completions[0])
            self.interrupted = code_of(ended)
        except KeyboardInterrupt as ended:
            self.interrupted = code_of(ended)

    def answer(self, line: str, check: Callable[[], None]) -> None:
        """One turn: the answer is printed while it is written, and joins the history.

        Args:
            check: raises what Python may have lost of Ctrl-C.
        """
        tokens = self._fitted(line)
        if tokens is None:
            return
        from jaxattn.cli.serve.styled_message import MessageText  # other commands need no parser

        text, last = MessageText(self.requests.tokenizer, tokens), "\n"

        def show(pieces: Sequence[StyledText]) -> None:
            nonlocal last
            for last, style in pieces:
                self.printer.write(last, style)

        def on_token(request: Request, token: int) -> None:
            check()
            show(text.push(token))

        number = len(self.completions)
        self.texts[number] = line
        request = self.requests.request(tokens, number)
        try:
            [done] = self.engine.generate([request], on_token=on_token)
        finally:
            show(text.end())
            if not last.endswith("\n"):
                self.printer.write("\n")
        self._end(done)
        if done.finish_reason == FinishReason.REFUSED:
            self.messages.print(f"refused: {done.detail}")
            self.history.pop()
        else:
            self.history.append(text.message)

    def _fitted(self, line: str) -> list[int] | None:
        """The history with this turn as tokens, without the oldest turns that do not fit.

        None if the turn alone is too long.
        """
        self.history.append(user(line))
        while True:
            tokens = in_template(self.requests.tokenizer, self.history)
            if len(tokens) <= self.requests.longest_prompt:
                return tokens
            first = next(i for i, each in enumerate(self.history) if each["role"] == "user")
            if first == len(self.history) - 1:
                self.history.pop()
                self.messages.print(
                    f"this turn has {len(tokens):,} tokens, and --max-model-len "
                    f"{self.requests.length} has room for {self.requests.longest_prompt:,} beside "
                    "an answer: it is left out"
                )
                return None
            del self.history[first : first + 2]
            self.messages.print("the oldest turn was dropped: the model length is reached")

    def _end(self, done: Completion) -> None:
        self.completions.append(done)
        self.stats = self.stats.with_more(self.engine.stats)
