"""What a step reads of prompts: how many tokens in all, and how many of each prompt."""

from collections.abc import Sequence

# Tokens that take as long as a step takes whatever its size: it reads the weights once.
# DeepSeek-V2-Lite on an H200: 136 ms for four chunks of 2,048 tokens, 98 ms for one of 8,192.
STEP_TOKENS = 1024


def prompt_pieces(
    sizes: Sequence[int], waiting: Sequence[Sequence[int]], *, line: int, rows: int
) -> tuple[int, list[list[int]]]:
    """The size that reads the most tokens for its time, and the tokens of each prompt.

    Prompts are read in the order of their turns until the step is full, so the last of them may get
    a piece of what it has left.

    Args:
        sizes: tokens of a data group that there are executables of, ascending.
        waiting: of each data group, the tokens that its due prompts may be read of, in the order of
            their turns.
        line: tokens that a prompt's piece is padded to a multiple of.
        rows: prompts of a data group that a step reads of, at most.
    """

    def pieces(size: int, group: Sequence[int]) -> list[int]:
        found, lines = [], size // line
        for left in group[:rows]:
            if lines <= 0:
                break
            found.append(min(left, lines * line))
            lines -= -(-left // line)
        return found

    def worth(size: int) -> tuple[float, int]:
        read = sum(sum(pieces(size, group)) for group in waiting)
        return read / (STEP_TOKENS + size), -size

    best = max(sizes, key=worth)
    return best, [pieces(best, group) for group in waiting]
