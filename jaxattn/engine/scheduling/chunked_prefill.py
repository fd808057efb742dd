"""The tokens that a step reads of prompts: how many in all, and how many of each prompt."""

import functools
from collections.abc import Sequence

# Tokens that take as long as a step takes whatever its size: it reads the weights once.
# DeepSeek-V2-Lite on an H200: 136 ms for four chunks of 2,048 tokens, 98 ms for one of 8,192.
STEP_TOKENS = 1024


def prompt_pieces(
    sizes: Sequence[int],
    waiting: Sequence[Sequence[int]],
    *,
    line: int,
    rows: int,
    whole: bool = False,
) -> tuple[int, list[list[int]]]:
    """The size of the next step, and the tokens that it reads of each prompt.

    The steps that read all that waits take the least time together, and the largest of them comes
    first. Prompts are read in the order of their turns until the step is full, so the last of them
    may get a piece of what it has left.

    Args:
        sizes: tokens of a data group that there are executables of, ascending, in whole lines.
        waiting: of each data group, the tokens that its due prompts may be read of, in the order of
            their turns.
        line: tokens that a prompt's piece is padded to a multiple of.
        rows: prompts of a data group that a step reads of, at most.
        whole: read of a prompt all that it may be read of, or nothing.
    """
    lines = max(sum(-(-left // line) for left in group[:rows]) for group in waiting)
    size = _largest_step(tuple(size // line for size in sizes), line, lines) * line

    def pieces(group: Sequence[int]) -> list[int]:
        found, free = [], size // line
        for left in group[:rows]:
            if free <= 0:
                break
            if whole and left > free * line:  # a shorter one may fit behind it
                found.append(0)
                continue
            found.append(min(left, free * line))
            free -= -(-left // line)
        return found

    return size, [pieces(group) for group in waiting]


@functools.lru_cache(maxsize=4096)
def _largest_step(sizes: tuple[int, ...], line: int, lines: int) -> int:
    """The largest of the steps, in lines, that read so many lines in the least time."""
    if lines >= sizes[-1]:  # with the least beside its tokens
        return sizes[-1]
    # Least time, and the largest step of those that take it, for each number of lines.
    best: list[tuple[int, int]] = [(0, 0)]
    for left in range(1, lines + 1):
        ways = []
        for size in sizes:
            time, largest = best[max(left - size, 0)]
            ways.append((time + STEP_TOKENS + size * line, -max(size, largest)))
        time, largest = min(ways)
        best.append((time, -largest))
    return best[lines][1]
