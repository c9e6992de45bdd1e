"""Softmax and the k largest of each row: one after the other, or in one pass over the scores.

Beam search and sampling want the k most likely entries of a softmax, not all of it. A pass over the
probabilities that a softmax has written costs one more access an element; taken along with online
softmax, the k largest scores, m and l come from reading the scores once, and no probability but
those k is ever made (Milakov & Gimelshein, arXiv 1805.02867, section 4).
"""

from __future__ import annotations

import math

import numpy as np

from simattn.counts import Counts
from simattn.dtypes import FLOAT32, Array
from simattn.masks import tiles
from simattn.memory import HBM, SRAM, Region, Tile
from simattn.run import SOFTMAXES
from simattn.softmax import OnlineSoftmax


class RankedTile(Tile):
    """A tile that can also take the largest of two tiles' rows."""

    __slots__ = ()

    def largest(self, k: int, other: Tile) -> Tile:
        """New tile [Br, k]: the k largest of each row of both, in falling order."""
        both = np.concatenate([self._array, other._array], axis=1)
        new = self._sram.new(-np.sort(-both, axis=1)[:, :k], "top")
        return new._count(both.size, self, other)


class RankingSRAM(SRAM):
    tile = RankedTile


def top_of(sram: SRAM, X: Region, T: Region, block_q: int, block_k: int) -> None:
    """The k largest of each row of X [R, C] into T [R, k]."""
    k = T.shape[1]
    for i in tiles(0, X.shape[0], block_q):
        top = sram.full((i.stop - i.start, k), -math.inf, "top")
        for j in tiles(0, X.shape[1], block_k):
            top = _take(sram, top, sram.load(X[i, j]), k)
        sram.store(T[i], top)
        sram.free(top)


def fused(sram: SRAM, X: Region, T: Region, block_q: int, block_k: int) -> None:
    """The k largest of softmax(X) into T [R, k], in one pass over X [R, C]."""
    k = T.shape[1]
    for i in tiles(0, X.shape[0], block_q):
        state = OnlineSoftmax.empty(sram, i.stop - i.start, None)
        top = sram.full((i.stop - i.start, k), -math.inf, "top")
        for j in tiles(0, X.shape[1], block_k):
            x = sram.load(X[i, j])
            assert isinstance(top, RankedTile)
            more = top.largest(k, x)
            sram.free(top)
            top = more
            state.update(x, None)
        P = top.shift(state.m).exp()  # [Br, k]
        P /= state.l
        sram.store(T[i], P)
        sram.free(P)
        state.free()


def _take(sram: SRAM, top: Tile, x: Tile, k: int) -> Tile:
    assert isinstance(top, RankedTile)
    more = top.largest(k, x)
    sram.free(top, x)
    return more


def softmax_topk(
    x: Array, k: int, *, algorithm: str = "fused", block_q: int = 1, block_k: int = 64
) -> tuple[Array, Counts]:
    """The k largest softmax values of each row of x (rows, columns), and the counts.

    ``algorithm``: ``fused``, or a softmax (``naive``, ``safe``, ``online``) with a pass after it.

    >>> x = np.log(np.array([[1.0, 5.0, 2.0, 2.0]], np.float32))
    >>> top, counts = softmax_topk(x, 2)
    >>> top.round(3), counts.traffic.reads
    (array([[0.5, 0.2]], dtype=float32), {'S': 4})
    """
    hbm, sram = HBM(), RankingSRAM(FLOAT32)
    out = np.empty((len(x), k), np.float32)
    hbm.place("S", np.asarray(x, np.float32), FLOAT32)
    hbm.place("T", out, FLOAT32)
    if algorithm == "fused":
        fused(sram, hbm.S, hbm.T, block_q, block_k)
    else:
        hbm.alloc("P", x.shape, FLOAT32)
        SOFTMAXES[algorithm](sram, hbm.S, hbm.P, None, block_q, block_k)
        top_of(sram, hbm.P, hbm.T, block_q, block_k)
    return out, sram.ledger.counts()
