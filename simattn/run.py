"""The public edge: check arguments once, run a variant head by head, hand back what it counted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from simattn import checks, iomodel, softmax, tiling
from simattn.counts import Counts, Flops, Traffic, differences
from simattn.dtypes import Array
from simattn.masks import TileGrid
from simattn.memory import HBM, SRAM, Ledger, SRAMCapacityError
from simattn.variants import VARIANTS, nest

DEFAULT_BLOCK = 64
SOFTMAXES = {f.__name__: f for f in (softmax.naive, softmax.safe, softmax.online, softmax.row)}


@dataclass(frozen=True, slots=True)
class Run:
    """What one call computed and counted.

    ``out`` has q's shape with V's width, and q's dtype. ``lse`` is L, float32 (float64 for float64
    input), or None. ``block_q``, ``block_k`` and ``splits`` are as used, after clamping. ``counts``
    is the ledger, ``predicted`` the closed form; totals over batch and query heads.
    """

    variant: str
    block_q: int
    block_k: int
    splits: int | None
    out: Array = field(repr=False)
    lse: Array | None = field(repr=False)
    counts: Counts
    predicted: Counts = field(repr=False)

    @property
    def traffic(self) -> Traffic:
        """HBM reads and writes per tensor, in elements and in bytes."""
        return self.counts.traffic

    @property
    def flops(self) -> Flops:
        return self.counts.flops

    @property
    def peak_sram_bytes(self) -> int:
        """The most that one program had live in SRAM."""
        return self.counts.peak_sram_bytes

    @property
    def as_predicted(self) -> bool:
        """Whether every count equals its closed form."""
        return self.counts == self.predicted

    def differences(self) -> list[str]:
        """The counts that differ from their closed form, each with both numbers."""
        return differences(self.counts, self.predicted)


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    variant: str = "q_outer",
    block_q: int | None = None,
    block_k: int | None = None,
    splits: int | None = None,
    sram_bytes: int | None = None,
    dtype: str | None = None,
    return_lse: bool = False,
) -> Run:
    """Exact softmax attention on a simulated HBM and SRAM, with every transfer counted.

    Parameters
    ----------
    q, k, v : (..., heads, n, d), (..., kv_heads, s, d), (..., kv_heads, s, e)
        float16, bfloat16 (as ``ml_dtypes`` has it), float32 or float64, all alike. kv_heads divides
        heads: query head h reads K/V head h // (heads / kv_heads). Two dimensions are one head.
    is_causal : bool
        Query i sees the keys up to i + s - n: the mask is aligned bottom-right (flash-attn's
        convention; torch and JAX align top-left). x visible::

            n = 2, s = 5      n = 5, s = 2
            x x x x .         . .
            x x x x x         . .
                              . .
                              x .
                              x x

    scale : float, optional
        Multiplies the scores; 1 / sqrt(d) by default.
    window_size : (int, int)
        How many keys before and after its position a query sees, both ends included, -1 for all.
        With ``is_causal`` none after.
    softcap : float
        Not available yet: only 0 is taken.
    variant : str
        One of ``standard_safe standard_online standard_row two_pass q_outer q_outer_each kv_outer
        kv_outer_end split_kv``; see `simattn.variants`.
    block_q, block_k : int, optional
        Rows of a tile, clamped to n and s; 1 and 1 is untiled. With neither these nor
        ``sram_bytes``: 64 and 64. One alone: `simattn.tiling.best` picks the other.
    splits : int, optional
        Parts of the keys in ``split_kv`` (default 4), at most the number of key tiles.
    sram_bytes : int, optional
        Capacity of one program's SRAM in bytes. Without blocks, `simattn.tiling.best` picks them.
    dtype : str, optional
        Storage format that the inputs are rounded to first; by default their own.
    return_lse : bool
        Also return L = log(sum(exp(score))) of each row, natural logarithm.

    Returns
    -------
    Run
        A row that sees no key has out = 0 and L = -inf.

    Raises
    ------
    ValueError, TypeError
        One line that names the argument, its value and the rule.
    SRAMCapacityError
        A ValueError: the tiles do not fit; names the bytes that they need.

    Examples
    --------
    >>> x = np.zeros((1024, 64), np.float32)
    >>> run = attention(x, x, x, variant="q_outer", block_q=64, block_k=64)
    >>> run.traffic.reads["K"], run.traffic.total_elems, run.as_predicted
    (1048576, 2228224, True)
    """
    given = {"q": checks.array("q", q), "k": checks.array("k", k), "v": checks.array("v", v)}
    storage = checks.storage_of(given, dtype)
    Q, K, V = checks.with_heads(*(checks.stored(x, storage) for x in given.values()))
    (*batch, heads, n, d), (s, e) = Q.shape, V.shape[-2:]
    if not isinstance(variant, str) or variant not in VARIANTS:
        raise ValueError(f"variant {variant!r}: must be one of {', '.join(VARIANTS)}")
    is_causal = checks.flag("is_causal", is_causal)
    return_lse = checks.flag("return_lse", return_lse)
    if checks.finite("softcap", softcap) != 0:
        raise ValueError(f"softcap {softcap!r}: not available yet, only 0 is taken")
    factor = 1 / math.sqrt(d) if scale is None else checks.finite("scale", scale)
    left, right = checks.window(window_size)
    sram_bytes = checks.optional_whole("sram_bytes", sram_bytes)
    shape: dict[str, Any] = {
        "n": n, "n_k": s, "d": d, "dv": e, "heads": heads, "batch": math.prod(batch),
        "splits": checks.optional_whole("splits", splits), "is_causal": is_causal,
        "window_size": (left, right), "dtype": storage.name, "return_lse": return_lse,
    }  # fmt: skip
    block_q = checks.optional_whole("block_q", block_q)
    block_k = checks.optional_whole("block_k", block_k)
    block_q, block_k = choose_blocks(variant, block_q, block_k, sram_bytes, **shape)
    predicted = iomodel.predict(variant, block_q=block_q, block_k=block_k, **shape)
    if sram_bytes is not None and predicted.peak_sram_bytes > sram_bytes:
        raise SRAMCapacityError(
            f"sram_bytes {sram_bytes}: {variant} with tiles of {block_q} x {block_k} rows needs "
            f"at least {predicted.peak_sram_bytes}"
        )

    grid = TileGrid(n, s, block_q, block_k, (left, 0 if is_causal else right))
    loops, parts = nest(variant, splits, s, block_k)
    out = np.empty((*Q.shape[:-1], e), storage.holder)
    lse = np.empty(Q.shape[:-1], storage.accumulator.holder) if return_lse else None
    group = heads // max(K.shape[-3], 1)
    ledger = Ledger()
    with np.errstate(all="ignore"):  # infinities and NaNs behave as in exact softmax
        for *b, h in np.ndindex(Q.shape[:-2]):
            hbm, sram = HBM(), SRAM(storage, sram_bytes, ledger)
            hbm.place("Q", Q[*b, h], storage)
            hbm.place("K", K[*b, h // group], storage)
            hbm.place("V", V[*b, h // group], storage)
            hbm.place("O", out[*b, h], storage)
            if lse is not None:
                hbm.place("L", lse[*b, h], storage.accumulator)
            loops(hbm, sram, grid, scale=factor, lse=return_lse)

    if given["q"].ndim == 2:
        out, lse = out[0], None if lse is None else lse[0]
    if dtype is None:
        out = out.astype(given["q"].dtype.newbyteorder("="), copy=False)
    return Run(variant, block_q, block_k, parts, out, lse, ledger.counts(), predicted)


def row_softmax(
    x: ArrayLike,
    *,
    algorithm: str = "online",
    block_q: int = 1,
    block_k: int = 1,
    sram_bytes: int | None = None,
    dtype: str | None = None,
) -> Run:
    """Softmax over the last axis of x (rows, columns), with every transfer counted.

    ``algorithm`` is ``naive`` (sum, divide; overflows), ``safe`` (maximum, sum, divide), ``online``
    (maximum and sum in one pass, divide) or ``row`` (one pass over a strip of whole rows): 3, 4, 3
    and 2 accesses an element (Milakov & Gimelshein, arXiv 1805.02867). Tiles are block_q rows by
    block_k columns; ``sram_bytes`` and ``dtype`` as in `attention`. Raises as `attention` does.

    >>> run = row_softmax(np.zeros((2, 8), np.float32), algorithm="safe")
    >>> run.out[0, 0], run.traffic.reads, run.traffic.writes
    (np.float32(0.125), {'S': 48}, {'P': 16})
    """
    if algorithm not in SOFTMAXES:
        raise ValueError(f"algorithm {algorithm!r}: must be one of {', '.join(SOFTMAXES)}")
    given = checks.array("x", x)
    storage = checks.storage_of({"x": given}, dtype)
    X = checks.stored(given, storage)
    if X.ndim != 2:
        raise ValueError(f"x {X.shape}: must have two dimensions, (rows, columns)")
    rows, columns = X.shape
    Br = min(checks.whole("block_q", block_q), max(rows, 1))
    Bc = min(checks.whole("block_k", block_k), max(columns, 1))
    predicted = iomodel.predict_softmax(
        algorithm, rows=rows, columns=columns, block_q=Br, block_k=Bc, dtype=storage.name
    )
    hbm, sram = HBM(), SRAM(storage, checks.optional_whole("sram_bytes", sram_bytes))
    if sram.capacity_bytes is not None and predicted.peak_sram_bytes > sram.capacity_bytes:
        raise SRAMCapacityError(
            f"sram_bytes {sram_bytes}: softmax {algorithm} with tiles of {Br} x {Bc} needs at "
            f"least {predicted.peak_sram_bytes}"
        )
    out = np.empty(X.shape, storage.holder)
    hbm.place("S", X, storage)
    hbm.place("P", out, storage)
    with np.errstate(all="ignore"):
        SOFTMAXES[algorithm](sram, hbm.S, hbm.P, None, Br, Bc)
    if dtype is None:
        out = out.astype(given.dtype.newbyteorder("="), copy=False)
    return Run(algorithm, Br, Bc, None, out, None, sram.ledger.counts(), predicted)


def choose_blocks(
    variant: str, block_q: int | None, block_k: int | None, sram_bytes: int | None, **shape: Any
) -> tuple[int, int]:
    """The tiles to use, clamped: those given, the planner's, or 64 x 64. See `attention`."""
    n, s = max(shape["n"], 1), max(shape["n_k"], 1)
    if block_q is None and block_k is None and sram_bytes is None:
        block_q = block_k = DEFAULT_BLOCK
    if block_q is None or block_k is None:
        tiles = tiling.best(variant, sram_bytes, block_q=block_q, block_k=block_k, **shape)
        if tiles is None:
            least = tiling.smallest_budget(variant, block_q=block_q, block_k=block_k, **shape)
            raise SRAMCapacityError(
                f"sram_bytes {sram_bytes}: the smallest tiles of {variant} need {least}"
            )
        block_q, block_k = tiles.block_q, tiles.block_k
    return min(block_q, n), min(block_k, s)
