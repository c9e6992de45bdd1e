"""Closed forms of the backward pass: what `backward.py` counts, from its shapes alone.

Term by term, and apart from the loops, as in ``iomodel.py``. With tiles of whole operands
Algorithm 3 moves 7ns + 2(n + s)(d + e) elements; Algorithm 4 moves nd + 3s(d + e) + Tc n(3d + 2e +
2), which for n = s = N and d = e is 7Nd + Tc(5Nd + 2N).
"""

from __future__ import annotations

from collections.abc import Callable

from simattn.counts import Counts
from simattn.dtypes import DTYPES
from simattn.iomodel import Bill, Shape
from simattn.tilesums import Grid, TileSums, visited_sizes


def standard_backward(bill: Bill, x: Shape) -> None:
    n, s, d, e = x.n, x.s, x.d, x.e
    A, Tr, Tc = n * s, -(-n // x.grid.block_q), -(-s // x.block_k)
    Br, Bc = x.tallest, min(x.block_k, s)
    rows, keys = Tc * n, Tr * s  # over all tiles

    bill.step(0, s * e)  # dV = 0
    bill.load("P", A)
    bill.load("dO", rows * e)
    bill.step(keys * e, keys * e, narrow=A + rows * e, matmul=2 * A * e)  # dV += P^T dO
    bill.store("dV", s * e)
    bill.live(Br * Bc + Br * e, Bc * e)  # P, dO; dV

    bill.load("dO", n * e)
    bill.load("V", keys * e)
    bill.step(0, A, narrow=rows * e + keys * e, matmul=2 * A * e)  # dP = dO V^T
    bill.store("dP", A)
    if n:
        bill.live(Br * e + Bc * e, Br * Bc)  # dO, V; dP

    bill.load("P", A)
    bill.load("dP", A)
    bill.step(0, n)  # D = 0
    bill.step(0, A, narrow=2 * A, flops=A)  # dP * P
    bill.step(A + n, n, flops=A + n)  # D += rowsum
    bill.step(n, n, flops=n)  # -D
    bill.step(n, A, narrow=A, flops=A)  # P * -D
    bill.step(2 * A, A, flops=A)  # their sum
    bill.step(A, A, flops=A)  # dS = scale * it
    bill.store("dS", A)
    strip, copy = Br * s, bill.overwrites(Br * s)
    bill.live(2 * strip, copy + Br)  # P, dP; dP * P, D
    bill.live(strip + (strip if not copy else 0), 2 * copy + Br)  # P; P * -D, dP * P, D

    bill.step(0, n * d)  # dQ = 0
    bill.load("dS", A)
    bill.load("K", keys * d)
    bill.step(rows * d, rows * d, narrow=A + keys * d, matmul=2 * A * d)  # dQ += dS K
    bill.store("dQ", n * d)
    if n:
        bill.live(Br * Bc + Bc * d, Br * d)  # dS, K; dQ

    bill.step(0, s * d)  # dK = 0
    bill.load("dS", A)
    bill.load("Q", rows * d)
    bill.step(keys * d, keys * d, narrow=A + rows * d, matmul=2 * A * d)  # dK += dS^T Q
    bill.store("dK", s * d)
    bill.live(Br * Bc + Br * d, Bc * d)  # dS, Q; dK


def kv_outer_backward(bill: Bill, x: Shape) -> None:
    n, s, d, e, sums = x.n, x.s, x.d, x.e, TileSums.of(x.grid)
    A, B, C, once = sums.pairs, sums.rows, sums.keys, sums.keys_once
    bill.step(0, n * d)  # dQ = 0
    bill.store("dQ", n * d)
    bill.step(0, s * (d + e))  # dK = 0, dV = 0
    bill.store("dK", s * d)
    bill.store("dV", s * e)

    bill.load("K", once * d)
    bill.load("V", once * e)
    bill.step(0, once * (d + e))  # dK = 0, dV = 0, the tiles
    bill.load("Q", B * d)
    bill.load("O", B * e)
    bill.load("dO", B * e)
    bill.load("dQ", B * d)
    bill.load("m", B, wide=True)
    bill.load("l", B, wide=True)
    bill.step(0, A, narrow=(B + C) * d, matmul=2 * A * d)  # S = Q K^T
    bill.step(A, A, flops=A)  # S * scale
    bill.step(A + B, A, flops=A)  # S - m
    bill.step(A, A, exp=A)  # exp
    bill.step(A + B, A, flops=A)  # P = it / l
    bill.step(C * e + A, C * e, narrow=B * e, matmul=2 * A * e)  # dV += P^T dO
    bill.step(0, A, narrow=(B + C) * e, matmul=2 * A * e)  # dP = dO V^T
    bill.step(0, B)  # D = 0
    bill.step(0, B * e, narrow=2 * B * e, flops=B * e)  # O * dO
    bill.step(B * e + B, B, flops=B * e + B)  # D += rowsum
    bill.step(A + B, A, flops=A)  # dP - D
    bill.step(2 * A, A, flops=A)  # P * it
    bill.step(A, A, flops=A)  # dS = scale * it
    bill.step(A, B * d, narrow=C * d, matmul=2 * A * d)  # dS K
    bill.step(B * d, B * d, narrow=B * d, flops=B * d)  # dQ + it
    bill.store("dQ", B * d)
    bill.step(C * d + A, C * d, narrow=B * d, matmul=2 * A * d)  # dK += dS^T Q
    bill.store("dK", once * d)
    bill.store("dV", once * e)

    bill.live(0, x.tallest * d)  # the first dQ
    bill.live(0, min(x.block_k, s) * max(d, e))  # the first dK, dV, one at a time
    for Br, Bc in visited_sizes(x.grid):
        # K, V, Q, O, dO, dQ; dK, dV, P, dP, D, O * dO. Then K, V, Q, dQ; dK, dV, dS, dS K.
        bill.live(
            Bc * (d + e) + 2 * Br * (d + e),
            Bc * (d + e) + 2 * Br * Bc + Br + bill.overwrites(Br * e),
        )
        bill.live(Bc * (d + e) + 2 * Br * d, Bc * (d + e) + Br * Bc + Br * d)
        bill.live(Bc * (d + e) + 2 * Br * (d + e), Bc * (d + e) + Br * Bc + 2 * Br)  # m, l too


FORMS: dict[str, Callable[[Bill, Shape], None]] = {
    f.__name__: f for f in (standard_backward, kv_outer_backward)
}


def predict_backward(
    variant: str,
    *,
    n: int,
    d: int,
    n_k: int | None = None,
    dv: int | None = None,
    heads: int = 1,
    batch: int = 1,
    block_q: int,
    block_k: int,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dtype: str = "float32",
) -> Counts:
    """What the backward pass of `backward.attention_backward` counts, without running it.

    >>> N, d = 1024, 64
    >>> predict_backward("standard_backward", n=N, d=d, block_q=N, block_k=N).traffic.total_elems
    7864320
    >>> 7 * N * N + 8 * N * d
    7864320
    """
    n_k, dv = n if n_k is None else n_k, d if dv is None else dv
    if variant not in FORMS:
        raise ValueError(f"variant {variant!r}: must be one of {', '.join(FORMS)}")
    left, right = window_size
    grid = Grid(
        n, n_k, min(block_q, max(n, 1)), min(block_k, max(n_k, 1)), left, 0 if is_causal else right
    )
    w, a = DTYPES[dtype].width_bytes, DTYPES[dtype].accumulator.width_bytes
    bill = Bill(w, a)
    FORMS[variant](bill, Shape(grid, d, dv, w, a, lse=False, splits=1))
    return bill.counts(batch * heads)
