"""The number of prompt tokens that a step reads, in all and from each prompt."""

import functools
from collections.abc import Sequence

# The fixed cost of a step, which reads the weights once, in tokens that take as long.
# DeepSeek-V2-Lite on an H200: 136 ms for four chunks of 2,048 tokens, 98 ms for one of 8,192.
STEP_TOKENS = 1024


def prompt_pieces(
    sizes: Sequence[int],
    waiting: Sequence[Sequence[int]],
    *,
    line: int,
    rows: int,
    whole_prompts: bool = False,
) -> tuple[int, list[list[int]]]:
    """Chooses the size of the next step, and the number of tokens that it reads of each prompt.

    It finds the sequence of steps that reads all waiting tokens in the least total time, and
    returns the largest of them. The step takes prompts in the order of their turns until it is
    full, so the last prompt may get only a piece.

    Args:
        sizes: The sizes of the executables in tokens per data group, ascending, in whole lines.
        waiting: For each data group, the number of tokens that the step may read of each due
            prompt, in the order of their turns.
        line: The tokens of a line; a piece of a prompt is padded to a multiple of it.
        rows: The maximum number of prompts of a data group in one step.
        whole_prompts: Whether to read of each prompt either all that the step may read, or nothing.
    """
    lines = max(sum(-(-left // line) for left in group[:rows]) for group in waiting)
    size = _largest_step(tuple(size // line for size in sizes), line, lines) * line

    def pieces(group: Sequence[int]) -> list[int]:
        found, free = [], size // line
        for left in group[:rows]:
            if free <= 0:
                break
            if whole_prompts and left > free * line:  # a shorter one may still fit
                found.append(0)
                continue
            found.append(min(left, free * line))
            free -= -(-left // line)
        return found

    return size, [pieces(group) for group in waiting]


@functools.lru_cache(maxsize=4096)
def _largest_step(sizes: tuple[int, ...], line: int, lines: int) -> int:
    """Returns the largest step, in lines, of the fastest sequence that reads so many lines."""
    if lines >= sizes[-1]:  # the largest step has the least fixed cost per token
        return sizes[-1]
    # For each number of lines, the least time and the largest step of the sequence that takes it.
    best: list[tuple[int, int]] = [(0, 0)]
    for left in range(1, lines + 1):
        ways = []
        for size in sizes:
            time, largest = best[max(left - size, 0)]
            ways.append((time + STEP_TOKENS + size * line, -max(size, largest)))
        time, largest = min(ways)
        best.append((time, -largest))
    return best[lines][1]
