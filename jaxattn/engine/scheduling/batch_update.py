"""Pending updates of the rows on the device, sent as packed arrays of one size."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxattn.engine.requests.request import MOST_BIASES, Request
from jaxattn.engine.steps.device_batch import INTEGERS, NUMBERS, STOPS, packed

_NO_TOKEN = 2**31 - 1


class BatchUpdate:
    """New rows and the pages that rows get, for `device_batch.update`.

    Args:
        batch: The number of rows of the engine.
    """

    def __init__(self, batch: int):
        self._none, self._size = batch, packed(batch)
        self._joins: list[np.ndarray] = []
        self._pages: list[tuple[int, int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._joins or self._pages)

    def join(
        self,
        row_index: int,
        slot: int,
        num_cached: int,
        last_position: int,
        request: Request,
        replayed: int = 0,
    ) -> None:
        """Adds the row at `row_index`, which may be sampled from now on.

        Args:
            num_cached: The number of tokens before the one whose logits come first.
            last_position: The position of the last token that the row may generate.
            replayed: The position of the first token that is sampled; earlier tokens are known.
        """
        head = np.array([row_index, num_cached], np.int32)
        controls = _controls(slot, last_position, replayed, request)
        self._joins.append(np.concatenate([head, controls, _biases(request)]))

    def pages(self, place: int, first: int, pages: Sequence[int]) -> None:
        """Writes pages into the block table of the row at `place`, from column `first` on."""
        self._pages += [(place, first + column, page) for column, page in enumerate(pages)]

    def clear(self) -> None:
        self._joins.clear()
        self._pages.clear()

    def drain(self) -> Iterator[np.ndarray]:
        """Yields packed arrays, int32 [n], until all updates are sent."""
        size = self._size
        while self:
            array = np.full(size.size, self._none, np.int32)
            joins = array[: size.joins * size.width].reshape(size.joins, size.width)
            for line, joined in zip(joins, self._joins, strict=False):
                line[:] = joined
            pages = array[size.joins * size.width :].reshape(size.pages, 3)
            now = self._pages[: size.pages]
            if now:
                pages[: len(now)] = now
            del self._joins[: size.joins], self._pages[: size.pages]
            yield array


def _controls(slot: int, last_position: int, replayed: int, request: Request) -> np.ndarray:
    """Returns a row of `DeviceBatch.controls`."""
    values = {
        "slot": slot,
        "last": last_position,
        "prompt": len(request.prompt),
        "replayed": replayed,
        "top_k": request.top_k,
        "seed": int(np.uint32(request.drawn_from).view(np.int32)),
    }
    integers = np.array([values[name] for name in INTEGERS], np.int32)
    numbers = np.array([getattr(request, name) for name in NUMBERS], np.float32)
    stops = np.full(STOPS, -1, np.int32)
    known = device_stops(request)
    stops[: len(known)] = known
    return np.concatenate([integers, numbers.view(np.int32), stops])


def device_stops(request: Request) -> tuple[int, ...]:
    """Returns the stop tokens that the device checks; the host finds others one step late."""
    return tuple(token for token in request.stops if 0 <= token < _NO_TOKEN)[:STOPS]


def _biases(request: Request) -> np.ndarray:
    """Returns a row of `DeviceBatch.biases`, flat: the tokens, then the bits of their biases."""
    tokens, biases = np.full(MOST_BIASES, _NO_TOKEN, np.int32), np.zeros(MOST_BIASES, np.float32)
    pairs = [pair for pair in request.biases if 0 <= pair[0] < _NO_TOKEN]
    tokens[: len(pairs)] = [token for token, _ in pairs]
    biases[: len(pairs)] = [bias for _, bias in pairs]
    return np.concatenate([tokens, biases.view(np.int32)])
