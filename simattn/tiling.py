"""Tile sizes for an SRAM budget: by the first tutorials' rule, by the paper's, and by exact search.

The two rules divide the budget by 4d and leave S out of the sum, so the tiles they name may need
more than the budget. The search charges every live tile, as the simulator does, and takes the tiles
that move the fewest bytes under the closed form. Without a granule it would degenerate: the traffic
of ``q_outer`` doesn't depend on block_k, so that one row would do.
"""

from __future__ import annotations

from bisect import bisect_left
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

    Examples
    --------
    >>> t = best("q_outer", 100_000, n=4096, d=64)
    >>> t.block_q, t.block_k, t.counts.peak_sram_bytes
    (144, 16, 92864)
    """
    if granule < 1:
        raise ValueError(f"granule {granule}: must be at least 1")
    s = shape.get("n_k")
    s = n if s is None else s
    masked = bool(shape.get("is_causal")) or shape.get("window_size", (-1, -1)) != (-1, -1)
    ask = partial(predict, variant, n=n, d=d, **shape)
    budget = float("inf") if sram_bytes is None else sram_bytes

    def fits(Br: int, Bc: int) -> bool:
        return ask(block_q=Br, block_k=Bc).peak_sram_bytes <= budget

    row_sizes = [block_q] if block_q else _multiples(granule, n)
    key_sizes = [block_k] if block_k else _multiples(granule, s)
    found: tuple[tuple[int, int, int], Tiles] | None = None
    for Br in reversed(_fitting(row_sizes, lambda Br: fits(Br, key_sizes[0]), masked)):
        sizes = _fitting(key_sizes, lambda Bc: fits(Br, Bc), masked)  # noqa: B023
        # Without a mask, more keys a tile never move more: the largest that fits is enough.
        for Bc in sizes if masked else sizes[-1:]:
            counts = ask(block_q=Br, block_k=Bc)
            rank = (counts.traffic.total_bytes, -Br * Bc, -Br)
            if found is None or rank < found[0]:
                found = rank, Tiles("best", Br, Bc, counts, fits=True)
        # Nor do more rows: no Br below this one can do better than with all keys in one tile.
        if found and not masked:
            all_keys = ask(block_q=Br, block_k=max(s, 1)).traffic.total_bytes
            if found[0] <= (all_keys, -Br * s, -Br):
                break
    return found[1] if found else None


def _multiples(granule: int, length: int) -> list[int]:
    return [*range(granule, length, granule), max(length, 1)]


def _fitting(sizes: list[int], fits: Callable[[int], bool], masked: bool) -> list[int]:
    """Those that fit. Larger tiles need more, except that a mask may hide the larger ones."""
    if masked:
        return [size for size in sizes if fits(size)]
    return sizes[: bisect_left(sizes, True, key=lambda size: not fits(size))]


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
    elems = sram_bytes // DTYPES[dtype].width_bytes
    ask = partial(predict, variant, n=n, d=d, dtype=dtype, **shape)
    s = shape.get("n_k")
    s = n if s is None else s
    chosen = []
    for rule, choose in (("seed", seed_rule), ("paper", paper_rule)):
        Br, Bc = choose(elems, d)
        Br, Bc = min(Br, max(n, 1)), min(Bc, max(s, 1))
        counts = ask(block_q=Br, block_k=Bc)
        chosen.append(Tiles(rule, Br, Bc, counts, counts.peak_sram_bytes <= sram_bytes))
    found = best(variant, sram_bytes, n=n, d=d, dtype=dtype, granule=granule, **shape)
    return [*chosen, found] if found else chosen
