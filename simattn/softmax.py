"""Online softmax, and the row softmaxes it came from.

``OnlineSoftmax`` is the recurrence that all of FlashAttention stands on. For the keys seen so far
it keeps, per query row,

    m    the largest score
    l    the sum of exp(score - m)
    acc  the sum of exp(score - m) * value

and when more keys come, what was summed under the old maximum is brought to the new one by the
factor exp(m_old - m_new) (Milakov & Gimelshein, arXiv 1805.02867, section 3; Rabe & Staats, arXiv
2112.05682). ``naive``, ``safe`` and ``online`` are softmaxes of whole rows in HBM, in as many
passes as they need: 3, 4 and 3 accesses an element (arXiv 1805.02867, section 4).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from simattn.masks import tiles

if TYPE_CHECKING:
    from simattn.masks import Visible
    from simattn.memory import SRAM, Region, Tile


class OnlineSoftmax:
    """The state (m, l, acc) of Br query rows, in SRAM.

    m, l: [Br]; acc: [Br, e], or None to follow m and l alone. With ``normalised`` acc is kept
    divided by l, as FlashAttention-1 does; without, the division waits for ``finish``.
    """

    __slots__ = ("acc", "l", "m", "normalised", "sram")

    def __init__(
        self, sram: SRAM, m: Tile, l: Tile, acc: Tile | None, *, normalised: bool = False
    ) -> None:
        self.sram, self.m, self.l, self.acc, self.normalised = sram, m, l, acc, normalised

    @classmethod
    def empty(
        cls, sram: SRAM, rows: int, width: int | None, *, normalised: bool = False
    ) -> OnlineSoftmax:
        """No keys seen: m = -inf, l = 0, acc = 0. The identity of ``merge``."""
        m = sram.full((rows,), -inf, "m")
        l = sram.full((rows,), 0.0, "l")
        acc = None if width is None else sram.full((rows, width), 0.0, "O")
        return cls(sram, m, l, acc, normalised=normalised)

    @classmethod
    def of_partial(cls, sram: SRAM, O: Tile, L: Tile) -> OnlineSoftmax:
        """The state of a finished part: exp(L) is its sum, so m = L and l = 1."""
        return cls(sram, L, sram.full(L.shape, 1.0, "l"), O)

    def update(self, S: Tile, V: Tile | None, visible: Visible = None) -> None:
        """Take in a tile of keys: scores S [Br, Bc], values V [Bc, e]. Consumes S."""
        self._raise_max(S.rowmax(self.m))
        P = S.shift(self.m).exp()  # [Br, Bc]
        self.l.add_rowsum(P)
        if self.acc is not None and V is not None:
            self.acc.accumulate(P, V, visible)
            if self.normalised:
                self.acc /= self.l
        self.sram.free(P)

    def merge(self, other: OnlineSoftmax) -> None:
        """Take in the state of other keys. Associative and commutative. Consumes ``other``."""
        m = self.m.maximum(other.m)
        self._raise_max(m)
        other._raise_max(m)
        self.l += other.l
        self.sram.free(other.l)
        if self.acc is not None and other.acc is not None:
            self.acc += other.acc
            self.sram.free(other.acc)

    def _raise_max(self, m: Tile) -> None:
        """Express the state under the new maximum m."""
        c = self.m.shift(m).exp()  # [Br], exp(m_old - m_new), in the place of the old m
        self.l *= c
        if self.acc is not None:
            # A normalised acc is the sum divided by the old l: times l c it is the sum, rescaled.
            self.acc *= self.l if self.normalised else c
        self.sram.free(c)
        self.m = m

    def finish(self) -> Tile:
        """O [Br, e], the softmax-weighted mean of the values seen; 0 for a row that saw no key."""
        if self.acc is None:
            raise ValueError("this state follows m and l alone: it has no output")
        if not self.normalised:
            self.acc /= self.l
        return self.acc

    def lse(self) -> Tile:
        """L [Br] = m + log(l), the log of the sum of exp(score); takes the place of l."""
        self.l = self.l.log()
        self.l += self.m
        return self.l

    def tiles(self) -> tuple[Tile, ...]:
        return (self.m, self.l) if self.acc is None else (self.m, self.l, self.acc)

    def free(self) -> None:
        self.sram.free(*self.tiles())


# Softmaxes of X [R, C] into Y [R, C], both in HBM, block_q rows by block_k columns at a time. With
# L [R] they leave the log of each row's sum there too.

RowSoftmax = Callable[["SRAM", "Region", "Region", "Region | None", int, int], None]


def naive(sram: SRAM, X: Region, Y: Region, L: Region | None, block_q: int, block_k: int) -> None:
    """Sum, then divide, in two passes. exp overflows where a score is large."""
    for i in tiles(0, X.shape[0], block_q):
        l = sram.full((i.stop - i.start,), 0.0, "l")
        for j in tiles(0, X.shape[1], block_k):
            P = sram.load(X[i, j]).exp()
            l.add_rowsum(P)
            sram.free(P)
        for j in tiles(0, X.shape[1], block_k):
            P = sram.load(X[i, j]).exp()
            P /= l
            sram.store(Y[i, j], P)
            sram.free(P)
        if L is not None:
            sram.store(L[i], l.log())
        sram.free(l)


def safe(sram: SRAM, X: Region, Y: Region, L: Region | None, block_q: int, block_k: int) -> None:
    """Three passes: the maximum, the sum under it, the quotient."""
    for i in tiles(0, X.shape[0], block_q):
        state = OnlineSoftmax.empty(sram, i.stop - i.start, None)
        for j in tiles(0, X.shape[1], block_k):
            x = sram.load(X[i, j])
            m = x.rowmax(state.m)
            sram.free(x, state.m)
            state.m = m
        for j in tiles(0, X.shape[1], block_k):
            P = sram.load(X[i, j]).shift(state.m).exp()
            state.l.add_rowsum(P)
            sram.free(P)
        _divide_pass(sram, X, Y, L, i, state, block_k)


def online(sram: SRAM, X: Region, Y: Region, L: Region | None, block_q: int, block_k: int) -> None:
    """Two passes: maximum and sum together, then the quotient."""
    for i in tiles(0, X.shape[0], block_q):
        state = OnlineSoftmax.empty(sram, i.stop - i.start, None)
        for j in tiles(0, X.shape[1], block_k):
            state.update(sram.load(X[i, j]), None)
        _divide_pass(sram, X, Y, L, i, state, block_k)


def _divide_pass(
    sram: SRAM, X: Region, Y: Region, L: Region | None, i: slice, state: OnlineSoftmax, block_k: int
) -> None:
    for j in tiles(0, X.shape[1], block_k):
        P = sram.load(X[i, j]).shift(state.m).exp()
        P /= state.l
        sram.store(Y[i, j], P)
        sram.free(P)
    if L is not None:
        sram.store(L[i], state.lse())
    state.free()


def row(sram: SRAM, X: Region, Y: Region, L: Region | None, block_q: int, block_k: int) -> None:
    """One pass, where a strip of whole rows fits SRAM. block_k plays no part."""
    for i in tiles(0, X.shape[0], block_q):
        state = OnlineSoftmax.empty(sram, i.stop - i.start, None)
        S = sram.load(X[i])  # [Br, C]
        m = S.rowmax(state.m)
        P = S.shift(m).exp()
        state.l.add_rowsum(P)
        P /= state.l
        sram.store(Y[i], P)
        sram.free(state.m, P)
        state.m = m
        if L is not None:
            sram.store(L[i], state.lse())
        state.free()
