"""The assignment and order of query tiles in the CTAs of a causal attention kernel."""

import functools
import heapq

import numpy as np


def head_group(heads: int, head_bytes: int, l2_bytes: int) -> int:
    """Returns the largest divisor of `heads` whose keys and values fit in `l2_bytes`, at least
    1."""
    fit = max(l2_bytes // head_bytes, 1)
    return max(g for g in range(1, heads + 1) if heads % g == 0 and g <= fit)


@functools.lru_cache
def tile_order(heads: int, tiles: int, group: int, blocks: int) -> np.ndarray:
    """Returns [blocks, rounds], the items of each CTA, -1 for none; not needed if each CTA has one.

    Items go by groups of heads, and within a group the tiles with the most keys go first. Each goes
    to the CTA that would be free first if all steps, and the beginning and end of each item, took
    the same time.
    """
    items = heads * tiles
    if items == blocks:
        return np.zeros((1, 1), np.int32)
    taken: list[list[int]] = [[] for _ in range(blocks)]
    free = [(0, block) for block in range(blocks)]
    for item in range(items):
        steps = tiles - item % (tiles * group) // group
        time, block = free[0]
        taken[block].append(item)
        heapq.heapreplace(free, (time + steps + 1, block))
    order = np.full((blocks, max(map(len, taken))), -1, np.int32)
    for block, mine in enumerate(taken):
        order[block, : len(mine)] = mine
    return order
