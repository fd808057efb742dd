"""Stop strings: text that may be the beginning of one is withheld until this is decided."""

from collections.abc import Sequence

from jaxattn.text import TokenStream


class StopStrings:
    """A filter that ends a text, which arrives in pieces, at the first stop string.

    Args:
        stops: The stop strings, none of them empty.
        included: Whether the stop string stays in the text.
    """

    def __init__(self, stops: Sequence[str], *, included: bool = False):
        self._stops, self._included = tuple(stops), included
        self._withheld = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text that has become final, and the stop string that ended it or None."""
        if not self._stops:
            return text, None
        pending = self._withheld + text
        places = [(pending.find(stop), stop) for stop in self._stops]
        found = min(((at, stop) for at, stop in places if at >= 0), default=None)
        if found is not None:
            at, stop = found
            self._withheld = ""
            return pending[: at + len(stop) if self._included else at], stop
        kept = max(map(_find_partial_stop, [pending] * len(self._stops), self._stops))
        self._withheld = pending[len(pending) - kept :]
        return pending[: len(pending) - kept], None

    def end(self) -> str:
        """Returns the withheld text, after the last piece."""
        held, self._withheld = self._withheld, ""
        return held


class StopText:
    """A `Request.ends_at` callback that returns whether a token completes a stop string.

    It detokenizes as the row's `ChoiceDetokenizer` does, so the row ends where its text ends. The
    device thread calls it.
    """

    def __init__(self, stream: TokenStream, stops: Sequence[str]):
        self._stream, self._stops = stream, StopStrings(stops)

    def __call__(self, token: int) -> bool:
        return self._stops.push(self._stream.push(token))[1] is not None


def _find_partial_stop(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
