"""Which tiles exist: causal masks and sliding windows as visible ranges of key rows.

With n query rows and s key rows, row i stands at key position i + s - n: the last query sits on the
last key, whatever the two lengths (flash-attn's convention). It sees the keys from ``left`` before
that position to ``right`` after it, both included, -1 meaning no bound. Causal is right = 0.

Causal, x visible::

    n = 2, s = 5      n = 5, s = 2
    x x x x .         . .
    x x x x x         . .
                      . .
                      x .
                      x x

``torch`` and JAX align their causal flag to the top left instead, so that with n = 2, s = 5 the
first query sees one key. The two agree when n = s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Visible = NDArray[np.bool_] | None


def tiles(start: int, stop: int, block: int) -> Iterator[slice]:
    """Slices of ``block`` rows that cover start..stop; the last is short where it doesn't divide.

    >>> [(t.start, t.stop) for t in tiles(0, 10, 4)]
    [(0, 4), (4, 8), (8, 10)]
    """
    for first in range(start, stop, block):
        yield slice(first, min(first + block, stop))


@dataclass(frozen=True, slots=True)
class TileGrid:
    """n query rows by s key rows, cut into tiles of block_q by block_k, seen through a mask."""

    n: int
    s: int
    block_q: int
    block_k: int
    window: tuple[int, int] = (-1, -1)  # (left, right), causal folded in

    def row_tiles(self) -> Iterator[slice]:
        """All tiles of query rows."""
        return tiles(0, self.n, self.block_q)

    def key_tiles(self) -> Iterator[slice]:
        """All tiles of key rows, seen or not."""
        return tiles(0, self.s, self.block_k)

    def key_tiles_seen(self) -> Iterator[slice]:
        """The key tiles that hold a key which some row sees."""
        return self.key_tiles_seen_by(slice(0, self.n))

    def key_tiles_seen_by(self, i: slice, part: tuple[int, int] = (0, 1)) -> Iterator[slice]:
        """The key tiles that hold a key which some row of tile ``i`` sees.

        ``part`` (t, p) keeps those of the t-th of p parts: tiles floor(t Tc / p) to
        floor((t + 1) Tc / p) - 1, Tc tiles in all.
        """
        first, last = self._span(i)
        t, p = part
        Tc = -(-self.s // self.block_k)
        start = max(first // self.block_k, t * Tc // p)
        stop = min(-(-last // self.block_k), (t + 1) * Tc // p)
        if i.start < i.stop and first < last:
            yield from tiles(start * self.block_k, min(stop * self.block_k, self.s), self.block_k)

    def row_tiles_that_see(self, j: slice) -> Iterator[slice]:
        """The query tiles of which some row sees a key of tile ``j``."""
        for i in self.row_tiles():
            first, last = self._span(i)
            if max(first, j.start) < min(last, j.stop):
                yield i

    def visible(self, i: slice, j: slice) -> Visible:
        """[Br, Bc], true where the row sees the key; None where every row sees every key."""
        left, right = self.window
        shift = self.s - self.n
        if (left < 0 or j.start >= i.stop - 1 + shift - left) and (
            right < 0 or j.stop - 1 <= i.start + shift + right
        ):
            return None
        ahead = np.arange(j.start, j.stop) - np.arange(i.start, i.stop)[:, None] - shift  # [Br, Bc]
        seen = np.ones(ahead.shape, np.bool_)
        if left >= 0:
            seen &= ahead >= -left
        if right >= 0:
            seen &= ahead <= right
        return seen

    def _span(self, i: slice) -> tuple[int, int]:
        """The key rows, first and one past the last, that some row of tile ``i`` sees."""
        left, right = self.window
        shift = self.s - self.n
        first = 0 if left < 0 else max(0, i.start + shift - left)
        last = self.s if right < 0 else min(self.s, i.stop + shift + right)
        return first, last
