"""Who computes which query tile, and when: the Hopper kernel's table of work. NumPy only.

The grid is as large as the device and stays; block c computes the items of row c, an item being one
query tile of one head. Four rules make the table:

- A few heads at a time, as many as have query tiles for all blocks (``waves`` times over): K and V
  of the heads under way are what the L2 cache must hold.
- Among those, items with the most work first. Under a causal mask a head's first query tile visits
  one key tile, its last one all of them; and a last query tile may have few rows.
- But those with the fewest key tiles, an eighth of a head's work, come last, those of all heads:
  they fill up what the longer ones leave uneven. Without them the last block of causal N = 1024,
  d = 128 ends 7.7 % later than the mean, with them 1.1 %.
- Each item to the block that is free first. Then the last block ends later than the mean by less
  than one item.

Read next: ``flash_sm90.py``, where the producer reads the table.
"""

from __future__ import annotations

import heapq

import numpy as np

from .problem import Problem
from .sm90_layout import GROUP_ROWS, Sm90Layout

END = 0xFFFFFFFF  # after a block's last item
HEAP_ITEMS = 1 << 14  # with more, `_in_rounds` is faster, and one item little of a block's work
TILE_COST, ITEM_COST = 5, 3  # an item costs 0.6 of a key tile besides its tiles
LATE = 8  # the items of a head that come last: an eighth of its work


def tiles_of(n: int, s: int, left: int, right: int, block_q: int, block_k: int) -> np.ndarray:
    """How many key tiles each query tile visits: [Tr].

    >>> tiles_of(256, 256, 512, 0, 64, 64)  # causal
    array([1, 2, 3, 4])
    """
    row = np.arange(0, n, block_q)
    rows = np.minimum(block_q, n - row)
    begin = np.maximum(0, row + (s - n - left))
    end = np.minimum(s, row + (s - n + right) + rows)
    return np.where(end > begin, -(-end // block_k) - begin // block_k, 0)


def costs_of(tiles: np.ndarray, n: int, block_q: int, sits_out: bool = True) -> np.ndarray:
    """What each query tile costs, in no unit: [Tr].

    If warpgroups without rows sit out, a tile with one of three takes 0.6 of the time, with two of
    three 0.8, with one of two 0.75.

    >>> costs_of(np.array([8, 8]), n=192 + 64, block_q=192)
    array([215, 129])
    """
    rows = np.minimum(block_q, n - block_q * np.arange(tiles.size)) if sits_out else block_q
    return (TILE_COST * tiles + ITEM_COST) * (2 + -(-rows // GROUP_ROWS))


def schedule(
    n: int,
    s: int,
    left: int,
    right: int,
    heads: int,
    *,
    block_q: int,
    block_k: int,
    blocks: int,
    waves: int = 1,
    sits_out: bool = True,
) -> np.ndarray:
    """The table [blocks, most items + 1] of uint32; ``heads`` counts those of the whole batch.

    Item i is query tile i mod Tr of head i // Tr. A row ends with `END`; no row is without items.

    >>> schedule(256, 256, 512, 0, 1, block_q=64, block_k=64, blocks=2)
    array([[         3,          0, 4294967295],
           [         2,          1, 4294967295]], dtype=uint32)
    """
    tiles = tiles_of(n, s, left, right, block_q, block_k)  # [Tr]
    cost = costs_of(tiles, n, block_q, sits_out)
    Tr = cost.size
    items = heads * Tr
    if items >= END:
        raise ValueError(f"q: {items} query tiles are more than {END - 1}")
    blocks = min(blocks, items)
    if items == 0:
        return np.full((0, 1), END, np.uint32)
    order = np.arange(items)
    if cost.min() == cost.max():
        return _table(order, order % blocks, blocks)
    head, tile = np.divmod(order, Tr)
    shortest = np.argsort(tiles, kind="stable")
    comes_last = np.zeros(Tr, bool)
    if tiles.min() < tiles.max():
        comes_last[shortest[np.cumsum(cost[shortest]) * LATE <= cost.sum()]] = True
    late = comes_last[tile]
    together = min(heads, -(-waves * blocks // Tr))  # heads under way
    together_with = np.where(late, 0, head // together)
    order = np.lexsort((head, -cost[tile], together_with, late))
    if items > HEAP_ITEMS:
        owner = _in_rounds(cost[order % Tr], blocks)
    else:
        owner = _first_free(cost[order % Tr].tolist(), blocks)
    return _table(order, owner, blocks)


def work(problem: Problem, layout: Sm90Layout, blocks: int) -> np.ndarray:
    """`schedule` for a problem in the tiles of a layout."""
    return schedule(
        problem.n, problem.s, problem.left, problem.right, problem.batch * problem.heads,
        block_q=layout.block_q, block_k=layout.block_k, blocks=blocks, waves=layout.waves,
        sits_out=layout.sits_out,
    )  # fmt: skip


def _first_free(costs: list[int], blocks: int) -> np.ndarray:
    """Each item's block. A heap's entry is the time at which a block is free, then its number."""
    bits = blocks.bit_length()
    mask = (1 << bits) - 1
    free = list(range(blocks))
    owner = []
    for cost in costs:
        entry = free[0]
        owner.append(entry & mask)
        heapq.heapreplace(free, entry + (cost << bits))
    return np.array(owner)


def _in_rounds(costs: np.ndarray, blocks: int) -> np.ndarray:
    """Each item's block, an item for each block at a time: the longest to the one with least."""
    owner = np.empty(costs.size, np.int64)
    spent = np.zeros(blocks, np.int64)
    for start in range(0, costs.size, blocks):
        some = costs[start : start + blocks]
        longest = np.argsort(-some, kind="stable")
        free = np.argsort(spent, kind="stable")[: some.size]
        owner[start + longest] = free
        spent[free] += some[longest]
    return owner


def _table(items: np.ndarray, owner: np.ndarray, blocks: int) -> np.ndarray:
    """Rows of the items that each block owns, in their order."""
    counts = np.bincount(owner, minlength=blocks)
    by_owner = np.argsort(owner, kind="stable")
    column = np.arange(items.size) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.full((blocks, counts.max() + 1), END, np.uint32)
    table[owner[by_owner], column] = items[by_owner]
    return table
