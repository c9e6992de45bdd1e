"""How often a running maximum really forces a rescale.

FlashAttention-2 multiplies its running sums by exp(m_old - m_new) at every key tile, most often by
1. FlashAttention-4 keeps an older reference maximum until the true one has risen above it by more
than 8 octaves, a factor of 2^8 = 256 in a weight, and only then rescales. The result stays exact: l
and O are sums under the same reference, whichever that is, and the last division cancels it. No
weight exceeds 256, so nothing overflows. The HBM traffic is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rescales:
    """Counts over all rows and all of a row's key tiles but the first."""

    visits: int  # FlashAttention-2's unconditional rescales
    rises: int  # where the maximum rose, so that the factor is not 1
    kept: int  # where it rose above the reference by more than the threshold
    largest_weight: float
    out: Float64 = field(repr=False)


def count_rescales(
    q: Float64,
    k: Float64,
    v: Float64,
    *,
    block_k: int,
    threshold_octaves: float = 8.0,
    scale: float | None = None,
) -> Rescales:
    """One head, q [n, d], k [s, d] and v [s, e], key tiles of ``block_k`` rows, in float64.

    >>> q, k = np.array([[1.0]]), np.array([[0.0], [1.0], [9.0], [9.5]])
    >>> r = count_rescales(q, k, k, block_k=1, scale=1.0)
    >>> r.visits, r.rises, r.kept  # only the step from 0 to 9 is above 8 ln 2 = 5.5
    (3, 3, 1)
    """
    factor = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    n, s = len(q), len(k)
    threshold = threshold_octaves * math.log(2)
    highest = np.full(n, -np.inf)  # the true maximum
    m = np.full(n, -np.inf)  # the reference
    l, O = np.zeros(n), np.zeros((n, v.shape[1]))
    visits = rises = kept = 0
    largest = 0.0
    for start in range(0, s, block_k):
        S = factor * q @ k[start : start + block_k].T  # [n, Bc]
        now = np.maximum(highest, S.max(axis=1))
        first = np.isneginf(m)
        far = now - m > threshold
        if start:
            visits += n
            rises += int((now > highest).sum())
            kept += int((far & ~first).sum())
        highest = now
        m_new = np.where(far, now, m)
        c = np.exp(m - m_new)
        P = np.exp(S - m_new[:, None])
        largest = max(largest, float(P.max()))
        l = c * l + P.sum(axis=1)
        O = c[:, None] * O + P @ v[start : start + block_k]
        m = m_new
    return Rescales(visits, rises, kept, largest, O / l[:, None])
