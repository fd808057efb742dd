"""A conversation in the terminal. Each line of stdin is a turn, and answers appear while they are
generated, with dim reasoning.

It ends with stdin or at Ctrl-C. Each turn's prompt contains the whole history. If the history
exceeds the model length, the oldest turns are dropped with a message.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rich.console import Console

from jaxattn.cli.exit_codes import code_of
from jaxattn.cli.serve.request_inputs import RequestFactory, apply_chat_template, user
from jaxattn.cli.serve.text_stream import StyledText, TextPrinter
from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.outputs import Completion, FinishReason, GenerationInterrupted
from jaxattn.engine.requests.request import GenerationStats, Request
from jaxattn.interrupt import interrupts_raised


def turns(stdin: TextIO, *, is_interactive: bool) -> Iterator[str]:
    """Yields the lines of stdin that are not blank.

    Args:
        is_interactive: Whether to show a prompt in the terminal and let the user edit lines.
    """
    lines = _asked() if is_interactive else (line.rstrip("\n") for line in stdin)
    return (line for line in lines if line.strip())


def _asked() -> Iterator[str]:
    with contextlib.suppress(ImportError):  # not every system has this module
        import readline  # noqa: F401  # makes input() edit lines
    while True:
        try:
            yield input("> ")
        except BaseException as ended:
            print()  # later output begins on a new line
            if isinstance(ended, EOFError):
                return
            raise


@dataclasses.dataclass(kw_only=True)
class Conversation:
    """A chat with a model in the terminal.

    Attributes:
        history: The messages so far, including the system prompt and answers.
        texts: The user's texts by the id of the answer's request.
        completions: The answers.
        stats: The statistics of all answers together.
        interrupted: The exit code for Ctrl-C or SIGTERM, or None.
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
        """Answers every line until the lines end, or until Ctrl-C."""
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
        """Answers one turn: prints the answer while it is generated, and adds it to the history.

        Args:
            check: Raises a Ctrl-C that Python may have lost; see `InterruptRequest.check`.
        """
        tokens = self._fitted(line)
        if tokens is None:
            return
        from jaxattn.cli.serve.styled_message import MessageText  # only chats need the parser

        text, last_text = MessageText(self.requests.tokenizer, tokens), "\n"

        def show(pieces: Sequence[StyledText]) -> None:
            nonlocal last_text
            for last_text, style in pieces:
                self.printer.write(last_text, style)

        def on_token(request: Request, token: int) -> None:
            check()
            show(text.push(token))

        number = len(self.completions)
        self.texts[number] = line
        request = self.requests.request(tokens, number)
        try:
            [completion] = self.engine.generate([request], on_token=on_token)
        finally:
            show(text.end())
            if not last_text.endswith("\n"):
                self.printer.write("\n")
        self._end(completion)
        if completion.finish_reason == FinishReason.REFUSED:
            self.messages.print(f"refused: {completion.detail}")
            self.history.pop()
        else:
            self.history.append(text.message)

    def _fitted(self, line: str) -> list[int] | None:
        """Adds a turn to the history, drops the oldest turns until it fits, and returns its tokens.

        Returns None if this turn is too long by itself.
        """
        self.history.append(user(line))
        while True:
            tokens = apply_chat_template(self.requests.tokenizer, self.history)
            if len(tokens) <= self.requests.longest_prompt:
                return tokens
            first_user_turn = next(
                i for i, each in enumerate(self.history) if each["role"] == "user"
            )
            if first_user_turn == len(self.history) - 1:
                self.history.pop()
                self.messages.print(
                    f"this turn has {len(tokens):,} tokens, but --max-model-len "
                    f"{self.requests.length} leaves room for {self.requests.longest_prompt:,} "
                    "besides an answer; the turn was dropped"
                )
                return None
            del self.history[first_user_turn : first_user_turn + 2]
            self.messages.print(
                "the oldest turn was dropped, because the conversation reached the model length"
            )

    def _end(self, completion: Completion) -> None:
        self.completions.append(completion)
        self.stats = self.stats.with_more(self.engine.stats)
