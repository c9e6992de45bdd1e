"""Tile sizes for an SRAM budget: by the first tutorials' rule, by the paper's, and by exact search.

The two rules divide the budget by 4d and leave S out of the sum, so the tiles they name may need
more than the budget. The search charges every live tile, as the simulator does, and takes the tiles
that move the fewest bytes under the closed form. Without a granule it would degenerate: the traffic
of ``q_outer`` doesn't depend on block_k, so that one row would do.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from simattn.counts import Counts
from simattn.dtypes import DTYPES
from simattn.iomodel import predict


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile rows, the rule that chose them, what they count, and whether they fit the budget."""

    rule: str
    block_q: int
    block_k: int
    counts: Counts
    fits: bool


def seed_rule(sram_elems: int, d: int) -> tuple[int, int]:
    """Br = ceil(M / 4d), Bc = min(Br, d), M in elements: the paper's rule with the names swapped.

    >>> seed_rule(1024, 10)
    (26, 10)
    """
    block_q = -(-sram_elems // (4 * d))
    return max(1, block_q), max(1, min(block_q, d))


def paper_rule(sram_elems: int, d: int) -> tuple[int, int]:
    """Bc = ceil(M / 4d), Br = min(Bc, d), M in elements (FlashAttention, arXiv 2205.14135, Alg. 1).

    >>> paper_rule(1024, 10)
    (10, 26)
    """
    block_k = -(-sram_elems // (4 * d))
    return max(1, min(block_k, d)), max(1, block_k)


RULES = {"seed": seed_rule, "paper": paper_rule}


def smallest_budget(
    variant: str, *, granule: int = 16, block_q: int | None = None, block_k: int | None = None,
    **shape: Any,
) -> int:  # fmt: skip
    """Bytes of SRAM below which `best` finds no tiles."""
    Br, Bc = block_q or granule, block_k or granule
    return predict(variant, block_q=Br, block_k=Bc, **shape).peak_sram_bytes


def best(
    variant: str,
    sram_bytes: int | None,
    *,
    n: int,
    d: int,
    granule: int = 16,
    block_q: int | None = None,
    block_k: int | None = None,
    **shape: Any,
) -> Tiles | None:
    """The tiles that move the fewest HBM bytes within ``sram_bytes`` (None: unbounded).

    Parameters
    ----------
    variant, n, d, **shape
        As in `simattn.predict`, tiles aside.
    granule : int
        Tile rows are multiples of it, or all the rows there are.
    block_q, block_k : int, optional
        A size already chosen; the other is searched.

    Returns
    -------
    Tiles, or None where not even the smallest fit (see `smallest_budget`). Of tiles that move
    equally little, those of the largest area are taken, then the largest block_q.

    Notes
    -----
    The outcome is that of trying every pair of sizes. One side of a tile decides the traffic: its
    query rows where keys stream past it, its key rows where queries do. That side's sizes are tried
    from the largest down, each with the other sizes that fit, until none left can do better.

    Examples
    --------
    >>> t = best("q_outer", 100_000, n=4096, d=64)
    >>> t.block_q, t.block_k, t.counts.peak_sram_bytes
    (144, 16, 92864)
    """
    if granule < 1:
        raise ValueError(f"granule {granule}: must be at least 1")
    search = _Search.of(variant, sram_bytes, n=n, d=d, **shape)
    row_sizes = [block_q] if block_q else _multiples(granule, n)
    key_sizes = [block_k] if block_k else _multiples(granule, search.s)
    rows = search.rows_that_fit(row_sizes, key_sizes[0])
    if not rows:
        return None
    keys = search.keys_that_fit(rows[0], key_sizes)
    deciding, most = (rows, keys[-1]) if search.rows_decide else (keys, rows[-1])
    if not search.regular:
        deciding = rows if search.rows_decide else key_sizes
        most = (key_sizes if search.rows_decide else row_sizes)[-1]

    found: tuple[tuple[int, int, int], Tiles] | None = None
    for size in reversed(deciding):
        bound = search.least_with(size, most)
        if found and found[0] <= bound:
            if not search.masked or found[0][0] < search.least_up_to(size):
                break
            continue
        if search.rows_decide:
            pairs = [(size, Bc) for Bc in search.keys_that_fit(size, key_sizes)]
        else:
            pairs = [(Br, size) for Br in search.rows_that_fit(row_sizes, size)]
        for Br, Bc in reversed(pairs if search.masked else pairs[-1:]):
            if found and found[0] <= (bound[0], -Br * Bc, -Br):
                break
            counts = search.ask(block_q=Br, block_k=Bc)
            rank = (counts.traffic.total_bytes, -Br * Bc, -Br)
            if found is None or rank < found[0]:
                found = rank, Tiles("best", Br, Bc, counts, fits=True)
    return found[1] if found else None


def _multiples(granule: int, length: int) -> list[int]:
    return [*range(granule, length, granule), max(length, 1)]


@dataclass(frozen=True, slots=True)
class _Search:
    """What `best` knows of a problem, so that it can leave out tiles without trying them."""

    ask: Callable[..., Counts]
    budget: float  # bytes
    n: int
    s: int
    splits: int
    masked: bool  # the mask bears on this variant's traffic
    rows_decide: bool  # the query rows of a tile decide its traffic, not the key rows
    bytes_per_row: int  # of a row that streams past one tile
    pairs: int  # visible pairs of a query and a key
    streamed: int  # rows that stream past at least one tile, whatever the tiles
    seen_up_to: int  # with no more query rows than this, tiles of full size hold visible pairs

    @classmethod
    def of(cls, variant: str, sram_bytes: int | None, **shape: Any) -> _Search:
        n, d = shape["n"], shape["d"]
        s = n if shape.get("n_k") is None else shape["n_k"]
        left, right = shape.get("window_size", (-1, -1))
        right = 0 if shape.get("is_causal") else right
        small = partial(predict, variant, n=2, d=d, n_k=2, block_k=2)
        rows_decide = small(block_q=1).traffic.total_bytes > small(block_q=2).traffic.total_bytes
        masked = (left, right) != (-1, -1) and not variant.startswith("standard")
        bytes_per_row = pairs = streamed = 0
        if masked and n and s:
            unmasked = partial(predict, variant, **{**shape, "is_causal": False,
                                                    "window_size": (-1, -1)})  # fmt: skip
            half = {"block_q": -(-n // 2), "block_k": s} if rows_decide else \
                   {"block_q": n, "block_k": -(-s // 2)}  # fmt: skip
            more = unmasked(**half).traffic.total_bytes
            more -= unmasked(block_q=n, block_k=s).traffic.total_bytes
            bytes_per_row = more // (s if rows_decide else n)
            mask = {"n": n, "d": d, "n_k": s, "window_size": (left, right)}
            untiled = predict("kv_outer", block_q=1, block_k=1, **mask)
            one_key_tile = predict("kv_outer", block_q=1, block_k=s, **mask)
            pairs = untiled.traffic.reads.get("Q", 0) // d
            seen = untiled.traffic.reads.get("K", 0), one_key_tile.traffic.reads.get("Q", 0)
            streamed = seen[0 if rows_decide else 1] // d
        all_seen = not masked or n == s or (left < 0 and n <= s)
        return cls(
            partial(predict, variant, **shape),
            float("inf") if sram_bytes is None else sram_bytes,
            n, s, shape.get("splits") or 4, masked, rows_decide, bytes_per_row, pairs, streamed,
            max(n, 1) if all_seen else s if left < 0 else 0,
        )  # fmt: skip

    @property
    def regular(self) -> bool:
        return self.seen_up_to >= self.n

    def rows_that_fit(self, row_sizes: list[int], Bc: int) -> list[int]:
        """Larger tiles need more, save that under a mask there may be no visible pair in them."""
        split = bisect_right(row_sizes, self.seen_up_to)
        known = self._first_fitting(row_sizes[:split], lambda Br: (Br, Bc))
        bare = partial(self.ask, n_k=0)  # what a tile of rows needs without any keys
        rest = self._first_fitting(row_sizes[split:], lambda Br: (Br, Bc), bare)
        return known + [Br for Br in rest if self._fits((Br, Bc), self.ask)]

    def keys_that_fit(self, Br: int, key_sizes: list[int]) -> list[int]:
        if Br <= self.seen_up_to:
            return self._first_fitting(key_sizes, lambda Bc: (Br, Bc))
        return [Bc for Bc in key_sizes if self._fits((Br, Bc), self.ask)]

    def _first_fitting(
        self,
        sizes: list[int],
        tile: Callable[[int], tuple[int, int]],
        ask: Callable[..., Counts] | None = None,
    ) -> list[int]:
        ask = ask or self.ask
        return sizes[: bisect_left(sizes, True, key=lambda size: not self._fits(tile(size), ask))]

    def _fits(self, tile: tuple[int, int], ask: Callable[..., Counts]) -> bool:
        return ask(block_q=tile[0], block_k=tile[1]).peak_sram_bytes <= self.budget

    def least_with(self, size: int, most: int) -> tuple[int, int, int]:
        """No tiles with a deciding side of ``size`` rank before this, the other up to ``most``."""
        Br, Bc = (size, most) if self.rows_decide else (most, size)
        if not self.masked:
            counts = self.ask(block_q=Br, block_k=Bc)
        elif self.rows_decide:  # key tiles of one row stream no hidden key
            parts = max(1, min(self.splits, -(-self.s // most)))
            counts = self.ask(block_q=Br, block_k=1, splits=parts)
        else:
            counts = self.ask(block_q=1, block_k=Bc)
        return counts.traffic.total_bytes, -Br * Bc, -Br

    def least_up_to(self, size: int) -> int:
        """Bytes that tiles with a deciding side of ``size`` or less move at the least: a streamed
        row meets at most ``size`` others at once."""
        return self.bytes_per_row * max(-(-self.pairs // size), self.streamed)


def plan(
    variant: str,
    sram_bytes: int,
    *,
    n: int,
    d: int,
    dtype: str = "float32",
    granule: int = 16,
    **shape: Any,
) -> list[Tiles]:
    """The tiles of the seed's rule, of the paper's rule, and of `best`, for one budget.

    A rule's M is the budget in elements of ``dtype``; its tiles are clamped to the problem.
    ``best`` is missing where nothing fits.
    """
    shape = {"n": n, "d": d, "dtype": dtype, **shape}
    chosen = [rule_tiles(rule, variant, sram_bytes, **shape) for rule in RULES]
    found = best(variant, sram_bytes, granule=granule, **shape)
    return [*chosen, found] if found else chosen


def rule_tiles(
    rule: str, variant: str, sram_bytes: int, *, n: int, d: int, dtype: str, **shape: Any
) -> Tiles:
    """The tiles of the ``seed``'s or the ``paper``'s rule, clamped to the problem."""
    s = n if shape.get("n_k") is None else shape["n_k"]
    Br, Bc = RULES[rule](sram_bytes // DTYPES[dtype].width_bytes, d)
    Br, Bc = min(Br, max(n, 1)), min(Bc, max(s, 1))
    counts = predict(variant, n=n, d=d, dtype=dtype, block_q=Br, block_k=Bc, **shape)
    return Tiles(rule, Br, Bc, counts, counts.peak_sram_bytes <= sram_bytes)
