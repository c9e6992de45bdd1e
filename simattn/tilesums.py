"""Sums over the tiles that a mask leaves, in O(log) by Euclid's algorithm.

Causal masks and windows bound the keys that a query tile sees by lines in its index; how many tiles
lie between two lines is a sum of floors. Ten million rows cost what ten do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grid:
    """n query rows in tiles of block_q by s key rows in tiles of block_k, both at least 1.

    A row at key position p = i + s - n sees the keys p - left to p + right; -1 is no bound.
    """

    n: int
    s: int
    block_q: int
    block_k: int
    left: int
    right: int


def floor_sum(count: int, slope: int, offset: int, modulus: int) -> int:
    """Sum of floor((slope * i + offset) / modulus) over i = 0 .. count - 1, for offset >= 0.

    Counts lattice points under a line, by Euclid's algorithm on (slope, modulus): O(log modulus).

    >>> floor_sum(4, 3, 1, 2)  # 0 + 2 + 3 + 5
    10
    """
    total = 0
    while count > 0:
        total += (slope // modulus) * (count * (count - 1) // 2) + (offset // modulus) * count
        slope, offset = slope % modulus, offset % modulus
        top = slope * count + offset
        # Points left under the line, counted by rows in place of columns.
        count, offset = divmod(top, modulus)
        slope, modulus = modulus, slope
    return total


@dataclass(frozen=True, slots=True)
class TileSums:
    """Sums over the visited tiles, those that hold at least one visible pair."""

    keys: int  # over query tiles: key rows of the tiles it visits. No mask: Tr * s
    rows: int  # over key tiles: query rows of the tiles that visit it. No mask: Tc * n
    pairs: int  # over visited tiles: rows x key rows. No mask: n * s
    keys_once: int  # key rows of the tiles that anyone visits. No mask: s

    @classmethod
    def of(cls, x: Grid) -> TileSums:
        full = x.n // x.block_q  # query tiles that are not short
        tiles, keys = _visits(x, full)
        short = x.n - full * x.block_q
        last_tiles, last_keys = _span_tiles(x, full * x.block_q, x.n) if short else (0, 0)
        return cls(
            keys=keys + last_keys,
            rows=x.block_q * tiles + short * last_tiles,
            pairs=x.block_q * keys + short * last_keys,
            keys_once=_span_tiles(x, 0, x.n)[1],
        )


def _span(x: Grid, start: int, stop: int) -> tuple[int, int]:
    """The keys that some row of start..stop sees, as (first, one past the last)."""
    first = 0 if x.left < 0 else max(0, start + x.s - x.n - x.left)
    last = x.s if x.right < 0 else min(x.s, stop + x.s - x.n + x.right)
    return first, last


def _sees(x: Grid, rows: tuple[int, int], keys: tuple[int, int]) -> bool:
    first, last = _span(x, *rows)
    return rows[0] < rows[1] and max(first, keys[0]) < min(last, keys[1])


def _span_tiles(x: Grid, start: int, stop: int) -> tuple[int, int]:
    """How many key tiles rows start..stop visit, and the key rows in them."""
    first, last = _span(x, start, stop)
    if start >= stop or first >= last:
        return 0, 0
    begin, end = first // x.block_k, -(-last // x.block_k)
    return end - begin, min(end * x.block_k, x.s) - begin * x.block_k


def _visits(x: Grid, full: int) -> tuple[int, int]:
    """The sums of ``_span_tiles`` over the first ``full`` query tiles, none of them short."""
    Br, Bc, Tc = x.block_q, x.block_k, -(-x.s // x.block_k)
    low = x.s - x.n - x.left  # tile i sees keys from Br i + low ...
    high = x.s - x.n + Br + x.right  # ... to Br i + high, before clipping to 0 .. s
    begin, end = 0, full if x.s else 0
    if x.right >= 0:
        begin = min(end, max(begin, _first_above(Br, high, 0)))  # before it, tiles see nothing
    if x.left >= 0:
        end = max(begin, min(end, _first_above(Br, low, x.s - 1)))  # from it on, they see nothing

    # The first key tile visited is floor((Br i + low) / Bc), or 0 until that line rises above 0.
    skipped = 0
    if x.left >= 0:
        rising = min(end, max(begin, _first_above(Br, low, -1)))
        skipped = floor_sum(end - rising, Br, Br * rising + low, Bc)
    # One past the last is ceil((Br i + high) / Bc), until it reaches the last tile, the short one.
    reaching, tiles = begin, 0
    if x.right >= 0:
        reaching = min(end, max(begin, _first_above(Br, high, (Tc - 1) * Bc)))
        tiles = floor_sum(reaching - begin, Br, Br * begin + high + Bc - 1, Bc)
    at_end = end - reaching
    return tiles + Tc * at_end - skipped, Bc * (tiles - skipped) + x.s * at_end


def _first_above(slope: int, offset: int, value: int) -> int:
    """The smallest integer i with slope * i + offset > value."""
    return (value - offset) // slope + 1


def visited_sizes(x: Grid) -> Iterator[tuple[int, int]]:
    """The sizes (Br, Bc) that occur among visited tiles: at most four."""
    for Br, rows in _tile_sizes(x.n, x.block_q):
        for Bc, keys in _tile_sizes(x.s, x.block_k):
            if _sees(x, rows, keys):
                yield Br, Bc


def _tile_sizes(length: int, block: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """(rows of a tile, the range that tiles of this size cover): full ones, then the short one."""
    cut = length // block * block
    if cut:
        yield block, (0, cut)
    if cut < length:
        yield length - cut, (cut, length)
