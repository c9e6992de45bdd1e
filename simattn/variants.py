"""The attention algorithms, as loop nests over two memories.

Every movement between the memories is a ``load`` or a ``store`` on the page, and the order of the
loops is the order of the ``for``s. NumPy isn't imported here: all arithmetic is on tiles.

============================  =========================================================
``standard_safe _online       S, then P, then O go through HBM (FlashAttention, arXiv
_row``                        2205.14135, Algorithm 0), with a 3-, 2- or 1-pass softmax
``two_pass``                  m and l from all keys first, then the output: K is read twice
``q_outer``                   a Q tile stays, K and V stream (FlashAttention-2, arXiv
                              2307.08691, Algorithm 1)
``q_outer_each``              the same, O divided by l at every step
``kv_outer``                  a K, V tile stays; Q, O, m, l stream (FlashAttention, arXiv
                              2205.14135, Algorithm 1)
``kv_outer_end``              the same, O divided by l once, in a last pass
``split_kv``                  parts of the keys apart, then merged (Flash-Decoding)
============================  =========================================================

Each takes ``hbm`` with Q [n, d], K [s, d], V [s, e], and O [n, e] to be filled (L [n] too with
``lse``), an ``sram`` of its own, and the ``grid`` of tiles. Untiled means tiles of one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from simattn import softmax
from simattn.softmax import OnlineSoftmax, RowSoftmax

if TYPE_CHECKING:
    from simattn.masks import TileGrid, Visible
    from simattn.memory import HBM, SRAM, Region, Tile


def scores(Q: Tile, K: Tile, scale: float, visible: Visible) -> Tile:
    """S [Br, Bc] = scale * Q K^T, -inf where a key is hidden."""
    return (Q @ K.T).scale(scale).hide(visible)


def q_outer(
    hbm: HBM, sram: SRAM, grid: TileGrid, *, scale: float, lse: bool, normalised: bool = False
) -> None:
    """A Q tile stays in SRAM while K and V stream past it."""
    for i in grid.row_tiles():
        Q = sram.load(hbm.Q[i])  # [Br, d]
        state = OnlineSoftmax.empty(sram, Q.shape[0], hbm.V.shape[1], normalised=normalised)
        for j in grid.key_tiles_seen_by(i):
            K, V = sram.load(hbm.K[j]), sram.load(hbm.V[j])  # [Bc, d], [Bc, e]
            visible = grid.visible(i, j)
            state.update(scores(Q, K, scale, visible), V, visible)
            sram.free(K, V)
        sram.store(hbm.O[i], state.finish())
        if lse:
            sram.store(hbm.L[i], state.lse())
        sram.free(Q)
        state.free()


def q_outer_each(hbm: HBM, sram: SRAM, grid: TileGrid, *, scale: float, lse: bool) -> None:
    """As ``q_outer``, but O is divided by l at every step: an output of the keys so far."""
    q_outer(hbm, sram, grid, scale=scale, lse=lse, normalised=True)


def two_pass(hbm: HBM, sram: SRAM, grid: TileGrid, *, scale: float, lse: bool) -> None:
    """First pass: m and l of each row. Second pass: the output under them."""
    for i in grid.row_tiles():
        Q = sram.load(hbm.Q[i])  # [Br, d]
        state = OnlineSoftmax.empty(sram, Q.shape[0], None)
        for j in grid.key_tiles_seen_by(i):
            K = sram.load(hbm.K[j])  # [Bc, d]
            state.update(scores(Q, K, scale, grid.visible(i, j)), None)
            sram.free(K)
        O = sram.full((Q.shape[0], hbm.V.shape[1]), 0.0, "O")
        for j in grid.key_tiles_seen_by(i):
            K, V = sram.load(hbm.K[j]), sram.load(hbm.V[j])  # [Bc, d], [Bc, e]
            visible = grid.visible(i, j)
            P = scores(Q, K, scale, visible).shift(state.m).exp()  # [Br, Bc]
            P /= state.l
            O.accumulate(P, V, visible)
            sram.free(K, V, P)
        sram.store(hbm.O[i], O)
        if lse:
            sram.store(hbm.L[i], state.lse())
        sram.free(Q, O)
        state.free()


def kv_outer(hbm: HBM, sram: SRAM, grid: TileGrid, *, scale: float, lse: bool) -> None:
    """A K, V tile stays in SRAM while Q and the running O, m, l travel through HBM."""
    _kv_outer(hbm, sram, grid, scale, hbm.O, normalised=True)
    if lse:
        for i in grid.row_tiles():
            state = OnlineSoftmax(sram, sram.load(hbm.m[i]), sram.load(hbm.l[i]), None)
            sram.store(hbm.L[i], state.lse())
            state.free()


def kv_outer_end(hbm: HBM, sram: SRAM, grid: TileGrid, *, scale: float, lse: bool) -> None:
    """As ``kv_outer``, but O travels undivided, at accumulator width; a last pass divides it."""
    hbm.alloc("O_undivided", hbm.O.shape, sram.accumulator, name="O")
    _kv_outer(hbm, sram, grid, scale, hbm.O_undivided, normalised=False)
    for i in grid.row_tiles():
        O, l = sram.load(hbm.O_undivided[i]), sram.load(hbm.l[i])  # [Br, e], [Br]
        O /= l
        sram.store(hbm.O[i], O)
        sram.free(O)
        if lse:
            state = OnlineSoftmax(sram, sram.load(hbm.m[i]), l, None)
            sram.store(hbm.L[i], state.lse())
            sram.free(state.m)
        sram.free(l)


def _kv_outer(
    hbm: HBM, sram: SRAM, grid: TileGrid, scale: float, O: Region, *, normalised: bool
) -> None:
    hbm.alloc("m", (grid.n,), sram.accumulator)
    hbm.alloc("l", (grid.n,), sram.accumulator)

    def load(i: slice) -> OnlineSoftmax:
        m, l, acc = sram.load(hbm.m[i]), sram.load(hbm.l[i]), sram.load(O[i])
        return OnlineSoftmax(sram, m, l, acc, normalised=normalised)

    def store(i: slice, state: OnlineSoftmax) -> None:
        for region, tile in zip((hbm.m, hbm.l, O), state.tiles(), strict=True):
            sram.store(region[i], tile)
        state.free()

    for i in grid.row_tiles():
        store(i, OnlineSoftmax.empty(sram, i.stop - i.start, O.shape[1]))
    for j in grid.key_tiles_seen():
        K, V = sram.load(hbm.K[j]), sram.load(hbm.V[j])  # [Bc, d], [Bc, e]
        for i in grid.row_tiles_that_see(j):
            Q = sram.load(hbm.Q[i])  # [Br, d]
            state = load(i)
            visible = grid.visible(i, j)
            state.update(scores(Q, K, scale, visible), V, visible)
            store(i, state)
            sram.free(Q)
        sram.free(K, V)


def split_kv(hbm: HBM, sram: SRAM, grid: TileGrid, *, scale: float, lse: bool, splits: int) -> None:
    """Each part of the keys gives every query row a partial (O, L); a second kernel merges them."""
    n, e = hbm.O.shape
    hbm.alloc("O_part", (splits, n, e), sram.accumulator)
    hbm.alloc("L_part", (splits, n), sram.accumulator)
    for t in range(splits):
        for i in grid.row_tiles():
            Q = sram.load(hbm.Q[i])  # [Br, d]
            state = OnlineSoftmax.empty(sram, Q.shape[0], e)
            for j in grid.key_tiles_seen_by(i, part=(t, splits)):
                K, V = sram.load(hbm.K[j]), sram.load(hbm.V[j])  # [Bc, d], [Bc, e]
                visible = grid.visible(i, j)
                state.update(scores(Q, K, scale, visible), V, visible)
                sram.free(K, V)
            sram.store(hbm.O_part[t, i], state.finish())
            sram.store(hbm.L_part[t, i], state.lse())
            sram.free(Q)
            state.free()
    for i in grid.row_tiles():
        state = OnlineSoftmax.empty(sram, i.stop - i.start, e)
        for t in range(splits):
            O, L = sram.load(hbm.O_part[t, i]), sram.load(hbm.L_part[t, i])  # [Br, e], [Br]
            state.merge(OnlineSoftmax.of_partial(sram, O, L))
        sram.store(hbm.O[i], state.finish())
        if lse:
            sram.store(hbm.L[i], state.lse())
        state.free()


def standard_safe(hbm: HBM, sram: SRAM, grid: TileGrid, *, scale: float, lse: bool) -> None:
    """S, P and O each in HBM, with the 3-pass softmax between."""
    _standard(hbm, sram, grid, scale, lse, softmax.safe)


def standard_online(hbm: HBM, sram: SRAM, grid: TileGrid, *, scale: float, lse: bool) -> None:
    """S, P and O each in HBM, with the 2-pass softmax between."""
    _standard(hbm, sram, grid, scale, lse, softmax.online)


def standard_row(hbm: HBM, sram: SRAM, grid: TileGrid, *, scale: float, lse: bool) -> None:
    """S, P and O each in HBM, with the 1-pass softmax of a Br x s strip between."""
    _standard(hbm, sram, grid, scale, lse, softmax.row)


def _standard(
    hbm: HBM, sram: SRAM, grid: TileGrid, scale: float, lse: bool, rows_softmax: RowSoftmax
) -> None:
    hbm.alloc("S", (grid.n, grid.s), hbm.Q.dtype)
    hbm.alloc("P", (grid.n, grid.s), hbm.Q.dtype)
    for i in grid.row_tiles():
        Q = sram.load(hbm.Q[i])  # [Br, d]
        for j in grid.key_tiles():
            K = sram.load(hbm.K[j])  # [Bc, d]
            S = scores(Q, K, scale, grid.visible(i, j))  # [Br, Bc]
            sram.store(hbm.S[i, j], S)
            sram.free(K, S)
        sram.free(Q)
    rows_softmax(sram, hbm.S, hbm.P, hbm.L if lse else None, grid.block_q, grid.block_k)
    for i in grid.row_tiles():
        O = sram.full((i.stop - i.start, hbm.V.shape[1]), 0.0, "O")
        for j in grid.key_tiles():
            P, V = sram.load(hbm.P[i, j]), sram.load(hbm.V[j])  # [Br, Bc], [Bc, e]
            O.accumulate(P, V, grid.visible(i, j))
            sram.free(P, V)
        sram.store(hbm.O[i], O)
        sram.free(O)


@dataclass(frozen=True, slots=True)
class Variant:
    """A loop nest, and what the code around it has to know of it."""

    loops: Callable[..., None]
    stores_scores: bool = False  # S and P go through HBM at storage width, whole even if masked
    stores_each_visit: bool = False  # O is rounded to storage width at every key tile
    takes_splits: bool = False


VARIANTS: dict[str, Variant] = {
    "standard_safe": Variant(standard_safe, stores_scores=True),
    "standard_online": Variant(standard_online, stores_scores=True),
    "standard_row": Variant(standard_row, stores_scores=True),
    "two_pass": Variant(two_pass),
    "q_outer": Variant(q_outer),
    "q_outer_each": Variant(q_outer_each),
    "kv_outer": Variant(kv_outer, stores_each_visit=True),
    "kv_outer_end": Variant(kv_outer_end),
    "split_kv": Variant(split_kv, takes_splits=True),
}


def nest(
    variant: str, splits: int | None, s: int, block_k: int
) -> tuple[Callable[..., None], int | None]:
    """The loop nest for s keys in tiles of block_k rows, and its number of parts if it has any.

    ``splits`` parts (default 4), at most one a key tile.
    """
    chosen = VARIANTS[variant]
    if not chosen.takes_splits:
        return chosen.loops, None
    parts = max(1, min(4 if splits is None else splits, -(-s // block_k)))
    return partial(chosen.loops, splits=parts), parts
