"""The output of text during generation: immediately for one request, in order for several."""

import re
from collections import deque
from collections.abc import Callable, Sequence

from rich.console import Console

from jaxattn.cli.serve.request_inputs import Prompt
from jaxattn.engine.requests.outputs import Completion
from jaxattn.engine.requests.request import Request
from jaxattn.text import Tokenizer

type StyledText = tuple[str, str | None]
COLORS = ("cyan", "green", "magenta", "yellow", "blue", "red")
# Control characters, which a terminal would execute, become U+FFFD. Tab and newline stay.
CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


class TextPrinter:
    """A writer of text. A terminal gets colors and no control characters; a file gets the text."""

    def __init__(self, console: Console):
        self._console = console

    def write(self, text: str, style: str | None = None) -> None:
        if self._console.quiet:
            return
        if self._console.is_terminal:
            self._console.out(text.translate(CONTROL), style=style, end="", highlight=False)
        else:  # bypasses rich, which would expand tabs
            self._console.file.write(text)
            self._console.file.flush()


class TextStream:
    """A printer of several requests' text during generation, in the order of the requests.

    It prints the text of the first unfinished request immediately, and keeps the text of later
    requests until those before them are done. Every text can therefore be read in one piece. With
    several requests, each line starts with its request's number. Each prompt is printed before the
    request's first token, dim on a terminal.

    Args:
        prompts: The prompts of the requests, in the same order.
        chat: Whether the requests are chats, whose answers begin on a new line.
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
        """Takes a token. Pass this method to `Engine.generate` as `on_token`."""
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = self._begun(self._prompts[request.id])
        text.push(token)
        self._flush()

    def _begun(self, prompt: Prompt) -> "_BufferedText":
        """Returns the text of a request, which begins with its prompt."""
        if self._chat:
            from jaxattn.cli.serve.styled_message import MessageText  # only chats need the parser

            answer = MessageText(self._tokenizer, prompt.tokens)
            text = _BufferedText(answer.push, answer.end)
            text.add(f"{prompt.text}\n", style="dim")
            return text
        # The stream reads the prompt first, because a character may span the prompt's end, and some
        # tokenizers drop the first space of a text.
        stream = self._tokenizer.stream()
        said = stream.push(*prompt.tokens)
        text = _BufferedText(
            lambda token: [(stream.push(token), None)], lambda: [(stream.end(), None)]
        )
        text.add(said if prompt.text is None else prompt.text, style="dim")
        return text

    def finish(self, completion: Completion) -> None:
        """Lets the next request print if this one did. Pass this method as `on_finish`."""
        self._done.add(completion.request.id)
        self._flush()

    def close(self) -> None:
        """Prints the remaining text of all requests, for example after Ctrl-C."""
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
                    self._printer.write(f"[{place + 1}] ", COLORS[place % len(COLORS)])
                self._printer.write(line, style)
                text.line_begins = line.endswith("\n")
            if number not in self._done:
                return
            self._turns.popleft()
            if not text.line_begins:
                self._printer.write("\n")


class _BufferedText:
    """The unprinted text of a request.

    Args:
        push: Returns the styled pieces of a token.
        end: Returns the remaining pieces after the last token.

    Attributes:
        waiting: Lines or parts of lines, each with its style.
        line_begins: Whether the text printed so far ends with a newline.
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
        # `splitlines` would also split at other characters than a newline.
        self.waiting.extend((line, style) for line in re.findall(r"[^\n]*\n|[^\n]+", text))
