"""The Hopper kernel's table of work: complete, balanced, and soon made."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.sm90_schedule import END, HEAP_ITEMS, schedule, tiles_of

TILES = {"block_q": 128, "block_k": 128}


def cost_of(n, s, left, right, block_q=128, block_k=128):
    """What each query tile costs: a warpgroup has 64 rows, and one that has none does nothing."""
    tiles = tiles_of(n, s, left, right, block_q, block_k)
    live = np.full(tiles.size, block_q // 64)
    live[-1] -= (block_q * tiles.size - n) // 64
    return (5 * tiles + 3) * (2 + live)


def costs(table, n, s, left, right):
    """What each block computes."""
    cost = cost_of(n, s, left, right)
    return np.array([cost[row[row != END] % cost.size].sum() for row in table]), cost


def check(table, n, s, left, right, heads, blocks):
    total, cost = costs(table, n, s, left, right)
    items = table[table != END]
    assert sorted(items) == list(range(heads * cost.size))
    assert table.dtype == np.uint32
    assert (table[:, 0] != END).all()
    assert (table[:, -1] == END).all()
    ends = table == END
    assert (ends[:, 1:] >= ends[:, :-1]).all()  # nothing after an end
    assert len(table) == min(blocks, items.size)
    return total, cost


@given(
    st.integers(1, 3000), st.integers(0, 3000), st.integers(0, 6000), st.integers(0, 6000),
    st.integers(1, 20), st.integers(1, 140), st.integers(1, 3),
)  # fmt: skip
def test_each_item_once_and_the_last_block_is_soon_done(n, s, left, right, heads, blocks, waves):
    table = schedule(n, s, left, right, heads, **TILES, blocks=blocks, waves=waves)
    total, cost = check(table, n, s, left, right, heads, blocks)
    assert total.max() <= total.sum() / len(table) + cost.max()


def test_few_heads_are_under_way():
    """Of the items that don't come last: by when they begin, heads are never far apart."""
    table = schedule(4096, 4096, 8192, 0, 64, **TILES, blocks=128)
    cost = cost_of(4096, 4096, 8192, 0)
    begins = []
    for row in table:
        items = row[row != END]
        starts = np.cumsum(cost[items % 32]) - cost[items % 32]
        begins += [(x, item // 32) for x, item in zip(starts, items, strict=True) if item % 32 > 12]
    heads = np.array([head for _, head in sorted(begins)], int)
    assert (np.maximum.accumulate(heads) - heads).max() <= 2 * 128 // 32


@pytest.mark.parametrize(
    ("n", "heads", "block_q", "waves", "most"),
    [
        (1024, 256, 128, 1, 1.012), (4096, 64, 128, 1, 1.005), (16384, 16, 128, 1, 1.005),
        (1024, 512, 128, 2, 1.008), (4096, 128, 128, 2, 1.005), (16384, 32, 192, 2, 1.005),
    ],
)  # fmt: skip
def test_causal_work_is_even(n, heads, block_q, waves, most):
    """16 k tokens, 2048 columns, on 132 multiprocessors."""
    shape = {"block_q": block_q, "block_k": 128}
    table = schedule(n, n, 2 * n, 0, heads, **shape, blocks=132, waves=waves)
    cost = cost_of(n, n, 2 * n, 0, **shape)
    total = np.array([cost[row[row != END] % cost.size].sum() for row in table])
    assert total.max() <= most * total.mean()


@pytest.mark.parametrize(
    ("n", "heads", "rounds", "most"),
    [(1024, 512, 24, 22.5), (4096, 128, 22, 21.7), (16384, 32, 21, 21.1)],
)
def test_a_last_tile_with_few_rows_is_worth_less(n, heads, rounds, most):
    """Without a mask, d = 64: the last tile has a third of the rows, and 0.6 of the time."""
    shape = {"block_q": 192, "block_k": 128, "blocks": 132, "waves": 2}
    Tr = -(-n // 192)
    ends = []
    for sits_out in (True, False):
        table = schedule(n, n, n, n, heads, **shape, sits_out=sits_out)
        spent = np.where(table == END, 0, np.where(table % Tr == Tr - 1, 0.6, 1))
        ends.append(spent.sum(axis=1).max())
    assert ends[0] <= most
    assert ends[1] == rounds


def test_the_longest_first():
    table = schedule(1024, 1024, 2048, 0, 16, **TILES, blocks=16, waves=8)  # all heads together
    tiles = tiles_of(1024, 1024, 2048, 0, **TILES)
    for row in table:
        assert (np.diff(tiles[row[row != END] % 8]) <= 0).all()


@pytest.mark.parametrize("right", [0, 1 << 21])
def test_many_items_are_dealt_out(right):
    heads, n = 4, 1 << 20
    assert heads * n // 128 > HEAP_ITEMS
    table = schedule(n, n, 1 << 21, right, heads, **TILES, blocks=132)
    total, _ = check(table, n, n, 1 << 21, right, heads, 132)
    assert total.max() <= 1.01 * total.mean()


@pytest.mark.parametrize(("n", "heads"), [(1024, 2731), (1024, 8192), (600, 10_000)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_many_short_tiles_are_dealt_out(n, heads, is_causal):
    shape = {"block_q": 192, "block_k": 128}
    cost = cost_of(n, n, n, 0 if is_causal else n, **shape)
    assert heads * cost.size > HEAP_ITEMS
    table = schedule(n, n, n, 0 if is_causal else n, heads, **shape, blocks=132, waves=2)
    assert sorted(table[table != END]) == list(range(heads * cost.size))
    total = np.array([cost[row[row != END] % cost.size].sum() for row in table])
    assert total.max() <= total.mean() + cost.max()


def test_nothing_to_do():
    assert schedule(0, 5, 5, 5, 3, **TILES, blocks=4).shape == (0, 1)
    assert schedule(5, 5, 5, 5, 0, **TILES, blocks=4).shape == (0, 1)


def test_items_are_numbered_in_32_bits():
    with pytest.raises(ValueError, match="query tiles"):
        schedule(1 << 30, 1, 1, 1, 1 << 10, block_q=64, block_k=64, blocks=132)
