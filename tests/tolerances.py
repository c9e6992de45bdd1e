"""The one place where floats are compared with an allowance.

On ordinary input the error allowed is twice that of an independent implementation at the same
precision, both against float64, plus one rounding of the result: `allowed`. Adversarial input can
make any one implementation lucky, so there the allowance is the a-priori bound of rounding
analysis, `simattn.bounds.error_bound`.
"""

from __future__ import annotations

import numpy as np

from simattn.dtypes import DType


def stored(x: np.ndarray, storage: DType) -> np.ndarray:
    """x in float64, after rounding to the storage format."""
    return storage.round(x).astype(np.float64)


def plain(q, k, v, *, scale, hidden, storage: DType, stores_scores: bool) -> np.ndarray:
    """softmax(scale * Q K^T) V of one head in plain NumPy, at the arithmetic of ``storage``."""
    arithmetic = storage.accumulator.holder
    q, k, v = (storage.round(x).astype(arithmetic) for x in (q, k, v))
    scores = np.where(hidden, -np.inf, q @ k.T * np.asarray(scale, arithmetic))
    if stores_scores:
        scores = storage.round(scores.astype(arithmetic)).astype(arithmetic)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    if stores_scores:
        weights = storage.round(weights).astype(arithmetic)
    return storage.round(weights @ v).astype(np.float64)


def allowed(q, k, v, *, scale, hidden, storage: DType, stores_scores=False, stores=1) -> float:
    """Twice the error of `plain`, plus one rounding for each time that O is stored."""
    q, k, v = (stored(x, storage) for x in (q, k, v))
    right = reference(q, k, v, scale=scale, hidden=hidden)
    other = plain(q, k, v, scale=scale, hidden=hidden, storage=storage, stores_scores=stores_scores)
    rounding = storage.eps / 2 * np.abs(right).max()
    return float(2 * np.abs(other - right).max() + stores * rounding)


def reference(q, k, v, *, scale, hidden) -> np.ndarray:
    """Float64 attention under any mask, for rows that see at least one key."""
    scores = np.where(hidden, -np.inf, q @ k.T * scale)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ v / weights.sum(axis=-1, keepdims=True)
