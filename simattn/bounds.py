"""How far a variant may stray from exact attention: derived from rounding analysis, not fitted.

Let u be the unit roundoff of the arithmetic, w that of the storage format, and T the key tiles.
A score is a dot product of d terms, scaled, then shifted by a maximum, all of size at most
|scale| max|q| max|k| (Cauchy-Schwarz): its error is at most delta = (d + 6) u times that, and w
times that more where S is stored. A weight is then off by a factor within exp(delta), and by one
rounding for each of its s additions and 4 T rescales: eta in all. O is a quotient of two sums of
weights, so it is off by at most 2 eta / (1 - eta) max|v|, and by w max|v| a time that it is
stored. Where numbers are subnormal, a rounding errs by half the least of them instead.
"""

from __future__ import annotations

import math

import numpy as np

from simattn.dtypes import Array, DType
from simattn.variants import VARIANTS


def error_bound(
    Q: Array,
    K: Array,
    V: Array,
    *,
    storage: DType,
    block_k: int,
    scale: float,
    variant: str | None = None,
) -> tuple[float, float]:
    """The largest error of an element of O, and of one of L, that rounding can explain.

    Q, K, V: (..., rows, width), the values as stored. Without ``variant``: of plain attention. The
    bound on O is never much above 2 max|v|, the distance between two weighted means.
    """
    if not (Q.size and K.size and V.size):
        return 0.0, 0.0
    u, w = storage.accumulator.eps / 2, storage.eps / 2
    s, d = K.shape[-2:]
    visits = -(-s // block_k)
    with np.errstate(over="ignore"):
        score = abs(scale) * _longest_row(Q) * _longest_row(K)
        largest_v = float(np.abs(np.asarray(V, np.float64)).max())
    delta = (d + 6) * u * score
    steps = s + 4 * visits + 8
    roundings = steps * u
    traits = VARIANTS[variant] if variant else None
    stores = visits + 1 if traits and traits.stores_each_visit else 1
    if traits and traits.stores_scores:
        delta += w * score
        roundings += w
    eta = math.expm1(min(delta, 700.0)) + roundings
    tiny = steps * _least(storage.accumulator) + stores * _least(storage)
    mean = 2 * eta / (1 - eta) if eta < 0.5 else 2.0
    out = min(mean, 2.0) * largest_v + stores * w * largest_v + tiny
    lse = delta + roundings / (1 - roundings) + 2 * u * (score + math.log(s))
    return out, lse


def _longest_row(X: Array) -> float:
    return float(np.sqrt((np.asarray(X, np.float64) ** 2).sum(axis=-1).max()))


def _least(storage: DType) -> float:
    """The largest error of rounding to a subnormal."""
    holder = np.float32 if storage.name == "bfloat16" else storage.holder
    return float(np.finfo(holder).smallest_normal) * storage.eps
