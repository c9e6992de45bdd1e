"""Tiles and masks against a mask drawn element by element."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from problems import windows

from simattn.masks import TileGrid


def drawn(n: int, s: int, window: tuple[int, int]) -> np.ndarray:
    seen = np.zeros((n, s), bool)
    for i in range(n):
        for j in range(s):
            ahead = j - (i + s - n)
            seen[i, j] = (window[0] < 0 or -ahead <= window[0]) and (
                window[1] < 0 or ahead <= window[1]
            )
    return seen


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 9), st.integers(1, 9), windows)
def test_visited_tiles_are_those_that_hold_a_visible_pair(n, s, block_q, block_k, window) -> None:
    grid = TileGrid(n, s, block_q, block_k, window)
    seen = drawn(n, s, window)
    rows, keys = list(grid.row_tiles()), list(grid.key_tiles())
    np.testing.assert_array_equal(np.concatenate([np.arange(n)[i] for i in rows] or [[]]),
                                  np.arange(n))  # fmt: skip
    np.testing.assert_array_equal(np.concatenate([np.arange(s)[j] for j in keys] or [[]]),
                                  np.arange(s))  # fmt: skip
    for i in rows:
        assert list(grid.key_tiles_seen_by(i)) == [j for j in keys if seen[i, j].any()]
    for j in keys:
        assert list(grid.row_tiles_that_see(j)) == [i for i in rows if seen[i, j].any()]
    assert list(grid.key_tiles_seen()) == [j for j in keys if seen[:, j].any()]
    for i in rows:
        for j in keys:
            visible = grid.visible(i, j)
            if visible is None:
                assert seen[i, j].all()
            else:
                np.testing.assert_array_equal(visible, seen[i, j])
                assert not visible.all()


@given(st.integers(0, 30), st.integers(1, 7), st.integers(1, 9), windows)
def test_parts_of_the_keys_cover_them_once(s, block_k, parts, window) -> None:
    grid = TileGrid(8, s, 4, block_k, window)
    tiles = -(-s // block_k)
    for i in grid.row_tiles():
        split = [list(grid.key_tiles_seen_by(i, (t, parts))) for t in range(parts)]
        assert [j for part in split for j in part] == list(grid.key_tiles_seen_by(i))
        for t, part in enumerate(split):
            for j in part:
                assert t * tiles // parts <= j.start // block_k < (t + 1) * tiles // parts
