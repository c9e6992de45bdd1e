"""Attention for an SRAM too small for a row of FlashAttention's tiles: the width is tiled as well.

With M < d^2 elements of SRAM, tiles of whole rows (d wide) are thin, and the traffic N^2 d^2 / M of
``q_outer`` is not the least there is: square tiles of Q and K, as in a blocked matrix product, move
of the order of N^2 d / sqrt(M) (Saha & Ye, arXiv 2402.07443, Theorems 1.1 and 1.2).

``square`` keeps no more than three tiles of about t x t, t = sqrt(M / 3). It writes S once, with m
and l of its rows on the way, and reads S back once for every t columns of V. The closed form is in
``iomodel_square.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from simattn import checks
from simattn.counts import Counts
from simattn.iomodel_square import predict_square
from simattn.masks import TileGrid, tiles
from simattn.memory import HBM, SRAM
from simattn.softmax import OnlineSoftmax

if TYPE_CHECKING:
    from simattn.dtypes import Array


def square(hbm: HBM, sram: SRAM, grid: TileGrid, *, scale: float, block_d: int) -> None:
    """S from tiles of Q and K, m and l from S, then O from tiles of S and V."""
    d, e = hbm.Q.shape[1], hbm.V.shape[1]
    hbm.alloc("S", (grid.n, grid.s), hbm.Q.dtype)
    for i in grid.row_tiles():
        state = OnlineSoftmax.empty(sram, i.stop - i.start, None)
        for j in grid.key_tiles_seen_by(i):
            S = sram.full((i.stop - i.start, j.stop - j.start), 0.0, "S")  # [Br, Bc]
            for c in tiles(0, d, block_d):
                Q, K = sram.load(hbm.Q[i, c]), sram.load(hbm.K[j, c])  # [Br, Bd], [Bc, Bd]
                S.accumulate(Q, K.T)
                sram.free(Q, K)
            S.scale(scale).hide(grid.visible(i, j))
            sram.store(hbm.S[i, j], S)
            state.update(S, None)
        for c in tiles(0, e, block_d):
            O = sram.full((i.stop - i.start, c.stop - c.start), 0.0, "O")  # [Br, Bd]
            for j in grid.key_tiles_seen_by(i):
                P = sram.load(hbm.S[i, j]).shift(state.m).exp()  # [Br, Bc]
                V = sram.load(hbm.V[j, c])  # [Bc, Bd]
                O.accumulate(P, V, grid.visible(i, j))
                sram.free(P, V)
            O /= state.l
            sram.store(hbm.O[i, c], O)
            sram.free(O)
        state.free()


@dataclass(frozen=True, slots=True)
class SquareRun:
    """What `attention_square` computed and counted; ``predicted`` is the closed form."""

    block: int
    out: Array = field(repr=False)
    counts: Counts
    predicted: Counts = field(repr=False)


def largest_block(sram_elems: int) -> int:
    """The largest t with 3t^2 + 3t elements: three square tiles, and m, l and a factor of t rows.

    >>> largest_block(3 * 8 * 8 + 3 * 8), largest_block(3 * 8 * 8 + 3 * 8 - 1)
    (8, 7)
    """
    return (math.isqrt(9 + 12 * max(sram_elems, 0)) - 3) // 6


def attention_square(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    block: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    sram_bytes: int | None = None,
    dtype: str | None = None,
) -> SquareRun:
    """Exact attention of one head with tiles of ``block`` rows by ``block`` columns.

    q [n, d], k [s, d], v [s, e]; options as in `simattn.attention`.

    >>> x = np.zeros((64, 32), np.float32)
    >>> run = attention_square(x, x, x, block=8)
    >>> run.counts.traffic.reads["Q"], run.counts.traffic.reads["S"], run.counts == run.predicted
    (16384, 16384, True)
    """
    given = {"q": checks.array("q", q), "k": checks.array("k", k), "v": checks.array("v", v)}
    storage = checks.storage_of(given, dtype)
    if given["q"].ndim != 2:
        raise ValueError(f"q {given['q'].shape}: must have two dimensions, (rows, width)")
    (Q,), (K,), (V,) = checks.with_heads(*(checks.stored(x, storage) for x in given.values()))
    (n, d), (s, e) = Q.shape, V.shape
    t = checks.whole("block", block)
    left, right = checks.window(window_size)
    grid = TileGrid(n, s, min(t, max(n, 1)), min(t, max(s, 1)), (left, 0 if is_causal else right))
    hbm, sram = HBM(), SRAM(storage, sram_bytes)
    out = np.empty((n, e), storage.holder)
    for name, array in (("Q", Q), ("K", K), ("V", V), ("O", out)):
        hbm.place(name, array, storage)
    factor = 1 / math.sqrt(d) if scale is None else checks.finite("scale", scale)
    with np.errstate(all="ignore"):
        square(hbm, sram, grid, scale=factor, block_d=t)
    predicted = predict_square(
        n=n, n_k=s, d=d, dv=e, block=t, is_causal=is_causal, window_size=(left, right),
        dtype=storage.name,
    )  # fmt: skip
    return SquareRun(t, out, sram.ledger.counts(), predicted)
