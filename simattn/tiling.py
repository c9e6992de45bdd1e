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
    The outcome is that of trying every pair of sizes. One side of a tile decides its traffic: its
    query rows where keys stream past it, its key rows where queries do. Of the other side it
    depends only through hidden rows that are streamed along, fewest if that side is one granule.

    Examples
    --------
    >>> t = best("q_outer", 100_000, n=4096, d=64)
    >>> t.block_q, t.block_k, t.counts.peak_sram_bytes
    (144, 16, 92864)
    """
    if granule < 1:
        raise ValueError(f"granule {granule}: must be at least 1")
    s = n if shape.get("n_k") is None else shape["n_k"]
    left, right = shape.get("window_size", (-1, -1))
    right = 0 if shape.get("is_causal") else right
    masked = (left, right) != (-1, -1)
    budget = float("inf") if sram_bytes is None else sram_bytes
    row_sizes, key_sizes = _sizes(block_q, granule, n), _sizes(block_k, granule, s)
    small: dict[str, Any] = {"n": 2, "n_k": 2, "d": 1, "block_k": 2}
    one, two = (predict(variant, block_q=Br, **small).traffic.total_elems for Br in (1, 2))
    keys_stream = one > two  # past each query tile
    inner = key_sizes if keys_stream else row_sizes

    def counts(x: int, y: int, **changes: Any) -> Counts:
        """Of a tile of ``x`` rows on the side that stays, ``y`` on the side that streams."""
        Br, Bc = (x, y) if keys_stream else (y, x)
        return predict(variant, n=n, d=d, block_q=Br, block_k=Bc, **{**shape, **changes})

    def fits(Br: int, Bc: int, **changes: Any) -> bool:
        at = {"block_q": Br, "block_k": Bc, "n": n, "d": d, **shape, **changes}
        return predict(variant, **at).peak_sram_bytes <= budget

    # Larger tiles need more, as long as the full tiles among them hold a visible pair. With no more
    # rows than these they do: the first key that anybody sees is followed by a whole tile of keys.
    first_seen = 0 if left < 0 else max(0, s - n - left)
    seen_keys = s - first_seen if masked else max(s, 1)
    seen_rows = s + right - first_seen if masked and right >= 0 else max(n, 1)

    def rows_that_fit(Bc: int) -> list[int]:
        sure = _up_to(row_sizes, seen_rows) if Bc <= seen_keys or not masked else row_sizes[:0]
        rest = row_sizes[len(sure) :]  # these need at least what they need without keys
        rest = _first(rest, lambda Br: fits(Br, 1, n_k=0))
        return [*_first(sure, lambda Br: fits(Br, Bc)), *(Br for Br in rest if fits(Br, Bc))]

    def keys_that_fit(Br: int) -> list[int]:
        sure = _up_to(key_sizes, seen_keys) if Br <= seen_rows or not masked else key_sizes[:0]
        rest = key_sizes[len(sure) :]
        return [*_first(sure, lambda Bc: fits(Br, Bc)), *(Bc for Bc in rest if fits(Br, Bc))]

    xs_that_fit, ys_that_fit = (
        (rows_that_fit, keys_that_fit) if keys_stream else (keys_that_fit, rows_that_fit)
    )
    xs = xs_that_fit(inner[0])
    widest = max(ys_that_fit(xs[0]), default=1) if xs else 1
    fewest_parts = max(1, min(shape.get("splits") or 4, -(-s // widest)))
    found: tuple[tuple[int, int, int], Tiles] | None = None
    for x in reversed(xs):
        least = counts(x, inner[0], splits=fewest_parts).traffic.total_bytes
        if found and least > found[0][0]:
            if masked:
                continue
            break  # without a mask, smaller tiles never move less
        for y in reversed(ys_that_fit(x)):
            Br, Bc = (min(x, n), min(y, s)) if keys_stream else (min(y, n), min(x, s))
            Br, Bc = max(Br, 1), max(Bc, 1)
            here = counts(x, y)
            rank = (here.traffic.total_bytes, -Br * Bc, -Br)
            if found is None or rank < found[0]:
                found = rank, Tiles("best", Br, Bc, here, fits=True)
            if not masked:
                break  # nor do smaller ones here
    return found[1] if found else None


def _up_to(sizes: range, limit: int) -> range:
    """Those that stand for at most ``limit`` rows, all of the last one's."""
    return sizes[: bisect_right(sizes, limit)]


def _first(sizes: range, fits: Callable[[int], bool]) -> range:
    """The sizes before the first that does not fit, where none after it does."""
    return sizes[: bisect_left(sizes, True, key=lambda size: not fits(size))]


def _sizes(chosen: int | None, granule: int, length: int) -> range:
    """Tile rows to try. The last may be more than there are: it stands for all of them."""
    if chosen:
        return range(chosen, chosen + 1)
    return range(granule, max(length, 1) + granule, granule)


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
