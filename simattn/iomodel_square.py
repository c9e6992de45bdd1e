"""Closed form of ``square_tiles.py``, from its shapes alone, and apart from its loops.

Of N x N pairs in tiles of t x t, with widths d: N^2 d / t for each of Q, K and V, N^2 of S written
and N^2 d / t read, Nd of O: 4 N^2 d / t + N^2 + Nd in all, where t divides N and d.
"""

from __future__ import annotations

from simattn.counts import Counts
from simattn.dtypes import DTYPES
from simattn.iomodel import Bill
from simattn.tilesums import Grid, TileSums, visited_sizes


def predict_square(
    *,
    n: int,
    d: int,
    n_k: int | None = None,
    dv: int | None = None,
    block: int,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dtype: str = "float32",
) -> Counts:
    """What `square_tiles.attention_square` counts, without running it.

    >>> N, d, t = 1024, 64, 16
    >>> predict_square(n=N, d=d, block=t).traffic.total_elems, 4 * N * N * d // t + N * N + N * d
    (17891328, 17891328)
    """
    s, e = n if n_k is None else n_k, d if dv is None else dv
    left, right = window_size
    grid = Grid(n, s, min(block, max(n, 1)), min(block, max(s, 1)), left, 0 if is_causal else right)
    sums = TileSums.of(grid)
    A, B, C = sums.pairs, sums.rows, sums.keys
    Td, Te = -(-d // block), -(-e // block)
    bill = Bill(DTYPES[dtype].width_bytes, DTYPES[dtype].accumulator.width_bytes)

    bill.step(0, 2 * n)  # m = -inf, l = 0
    bill.step(0, A)  # S = 0
    bill.load("Q", B * d)
    bill.load("K", C * d)
    bill.step(Td * A, Td * A, narrow=(B + C) * d, matmul=2 * A * d)  # S += Q K^T
    bill.step(A, A, flops=A)  # S * scale
    bill.store("S", A)
    bill.step(A + B, B, flops=A + B)  # m_new
    bill.step(2 * B, B, flops=B)  # m - m_new
    bill.step(B, B, exp=B)  # c
    bill.step(2 * B, B, flops=B)  # l * c
    bill.step(A + B, A, flops=A)  # S - m
    bill.step(A, A, exp=A)  # P
    bill.step(A + B, B, flops=A + B)  # l + rowsum P

    bill.step(0, n * e)  # O = 0
    bill.load("S", Te * A)
    bill.step(Te * B, Te * A, narrow=Te * A, flops=Te * A)  # S - m
    bill.step(Te * A, Te * A, exp=Te * A)  # P
    bill.load("V", C * e)
    bill.step(Te * A + B * e, B * e, narrow=C * e, matmul=2 * A * e)  # O += P V
    bill.step(n * e + Te * n, n * e, flops=n * e)  # O / l
    bill.store("O", n * e)

    Br, wide = min(grid.block_q, n), min(block, e)
    bill.live(0, Br * (wide + 2))  # O, m, l
    for Br, Bc in visited_sizes(grid):
        chunk = min(block, d)
        bill.live((Br + Bc) * chunk, Br * Bc + 2 * Br)  # Q, K; S, m, l
        bill.live(0, Br * Bc + 3 * Br)  # S, m, l, m_new
        bill.live(Br * Bc, bill.overwrites(Br * Bc) + Br * wide + 2 * Br)  # S; S - m, O, m, l
        bill.live(Bc * wide, Br * Bc + Br * wide + 2 * Br)  # V; P, O, m, l
    return bill.counts(1)
