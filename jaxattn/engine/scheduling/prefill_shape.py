"""The shape of a prefill step: how many prompts it reads of, and how many tokens of each."""

from collections.abc import Sequence

# Tokens that take as long as a step takes whatever its size: it reads the weights once.
# DeepSeek-V2-Lite on an H200: 136 ms for four chunks of 2,048 tokens, 98 ms for one of 8,192.
STEP_TOKENS = 1024


def prefill_shape(
    shapes: Sequence[tuple[int, int]], waiting: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """The shape that reads the most tokens for its time; of equals, that of more prompts.

    A long prompt takes a long chunk, several short ones are read together, and the last tokens of
    a prompt are not padded to more than their time is worth.

    Args:
        shapes: (prompts, tokens of each) that there are executables of, the smallest first.
        waiting: of each data group, the tokens that its due prompts have left, in the order of
            their turns. A shape reads as many first ones of each group.
    """
    groups = len(waiting)

    def worth(shape: tuple[int, int]) -> tuple[float, int]:
        rows, tokens = shape
        lines = rows // groups
        read = sum(min(left, tokens) for group in waiting for left in group[:lines])
        return read / (STEP_TOKENS + lines * tokens), lines

    return max(shapes, key=worth)
