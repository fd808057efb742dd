"""The text while it is generated: of one request as it comes, of several in their order."""

import re
from collections import deque
from collections.abc import Callable, Sequence

from rich.console import Console

from jaxattn.cli.serve.request_inputs import Prompt
from jaxattn.engine.requests.outputs import Completion
from jaxattn.engine.requests.request import Request
from jaxattn.text import Tokenizer

type StyledText = tuple[str, str | None]
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")
# A terminal would obey control characters; all but tab and newline are shown as undecodable.
CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


class TextPrinter:
    """Writes pieces of text as they are: to a terminal in colour and without control characters."""

    def __init__(self, console: Console):
        self._console = console

    def write(self, text: str, style: str | None = None) -> None:
        if self._console.quiet:
            return
        if self._console.is_terminal:
            self._console.out(text.translate(CONTROL), style=style, end="", highlight=False)
        else:  # not through rich, which expands tabs
            self._console.file.write(text)
            self._console.file.flush()


class TextStream:
    """Prints tokens as text while they are generated, in the order of the requests.

    The first request that is not done flows as it is generated. What the others generate meanwhile
    is kept and printed when those before them are done, so that every text can be read in one
    piece. Of several, each line starts with its request's number. A request's prompt is printed
    before its first token, dim on a terminal.

    Args:
        prompts: of the requests, in their order.
        chat: answers begin on a line of their own.
    """

    def __init__(
        self,
        printer: TextPrinter,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        prompts: Sequence[Prompt],
        *,
        chat: bool = False,
    ):
        self._printer, self._tokenizer, self._chat = printer, tokenizer, chat
        self._numbered = len(requests) > 1
        self._prompts = {r.id: prompt for r, prompt in zip(requests, prompts, strict=True)}
        self._turns = deque(request.id for request in requests)
        self._texts: dict[int | None, _BufferedText] = {}
        self._done: set[int | None] = set()

    def token(self, request: Request, token: int) -> None:
        """For `Engine.generate`'s `on_token`."""
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = self._begun(self._prompts[request.id])
        text.push(token)
        self._flush()

    def _begun(self, prompt: Prompt) -> "_BufferedText":
        """A request's text, which its prompt begins."""
        if self._chat:
            from jaxattn.cli.serve.styled_message import MessageText  # others need no parser

            answer = MessageText(self._tokenizer, prompt.tokens)
            text = _BufferedText(answer.push, answer.end)
            text.add(f"{prompt.text}\n", style="dim")
            return text
        # The stream has read the prompt: a character may lie on both sides of its end, and some
        # tokenizers leave out a text's first space.
        stream = self._tokenizer.stream()
        said = stream.push(*prompt.tokens)
        text = _BufferedText(
            lambda token: [(stream.push(token), None)], lambda: [(stream.end(), None)]
        )
        text.add(said if prompt.text is None else prompt.text, style="dim")
        return text

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
            text = self._texts.get(number) or _BufferedText()
            if number in self._done:
                text.finish()
            while text.waiting:
                line, style = text.waiting.popleft()
                if text.line_begins and self._numbered:
                    place = number or 0
                    self._printer.write(f"[{place + 1}] ", COLOURS[place % len(COLOURS)])
                self._printer.write(line, style)
                text.line_begins = line.endswith("\n")
            if number not in self._done:
                return
            self._turns.popleft()
            if not text.line_begins:
                self._printer.write("\n")


class _BufferedText:
    """A request's text until it is printed.

    Args:
        push: the pieces of a token.
        end: what is left after the last one.

    Attributes:
        waiting: lines or parts of one, each with its style.
        line_begins: whether what was printed of it ends with a newline.
    """

    def __init__(
        self,
        push: Callable[[int], Sequence[StyledText]] = lambda token: (),
        end: Callable[[], Sequence[StyledText]] = tuple,
    ) -> None:
        self._push, self._end = push, end
        self.waiting: deque[StyledText] = deque()
        self.line_begins = True

    def push(self, token: int) -> None:
        for piece in self._push(token):
            self.add(*piece)

    def finish(self) -> None:
        for piece in self._end():
            self.add(*piece)

    def add(self, text: str, style: str | None = None) -> None:
        # Not splitlines, to which other characters than a newline end a line.
        self.waiting.extend((line, style) for line in re.findall(r"[^\n]*\n|[^\n]+", text))
