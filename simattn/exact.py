"""The oracle: softmax attention in float64, a row in one piece. Shares no code with a variant."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]
ROW_CHUNK_ELEMS = 1 << 24  # rows at a time, so that scores of a long problem fit memory


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[Float64, Float64]:
    """softmax(scale * Q K^T) V and L, the log of each row's sum, in float64.

    Parameters
    ----------
    q, k, v : (..., heads, n, d), (..., kv_heads, s, d), (..., kv_heads, s, e)
        Two-dimensional inputs are one head. kv_heads divides heads.
    is_causal, scale, window_size
        As in `simattn.attention`; scale None is 1 / sqrt(d).

    Returns
    -------
    out : (..., heads, n, e); L : (..., heads, n)
        A row that sees no key, or only scores of -inf, has out = 0 and L = -inf.

    Examples
    --------
    >>> out, L = attention([[0.0]], [[1.0], [2.0]], [[10.0], [20.0]])
    >>> out.tolist(), round(float(np.exp(L[0])), 12)
    ([[15.0]], 2.0)
    """
    Q, K, V = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    n, s = Q.shape[-2], K.shape[-2]
    if Q.ndim > 2:
        group = Q.shape[-3] // max(K.shape[-3], 1)
        K, V = (np.repeat(x, group, axis=-3) for x in (K, V))
    factor = 1 / np.sqrt(Q.shape[-1]) if scale is None else scale
    out = np.empty((*Q.shape[:-1], V.shape[-1]))
    L = np.empty(Q.shape[:-1])
    rows = max(1, ROW_CHUNK_ELEMS // max(s, 1))
    for head in np.ndindex(Q.shape[:-2]):
        for start in range(0, n, rows):
            part = slice(start, start + rows)
            hidden = _hidden(np.arange(n)[part], n, s, is_causal, window_size)
            out[head][part], L[head][part] = _rows(Q[head][part], K[head], V[head], factor, hidden)
    return out, L


def _hidden(
    rows: NDArray[Any], n: int, s: int, is_causal: bool, window_size: tuple[int, int]
) -> NDArray[np.bool_]:
    ahead = np.arange(s)[None, :] - (rows[:, None] + s - n)  # how far a key lies past its query
    left, right = window_size
    hidden = np.zeros(ahead.shape, dtype=np.bool_)
    if is_causal:
        hidden |= ahead > 0
    if left != -1:
        hidden |= -ahead > left
    if right != -1:
        hidden |= ahead > right
    return hidden


def _rows(
    Q: Float64, K: Float64, V: Float64, scale: float, hidden: NDArray[np.bool_]
) -> tuple[Float64, Float64]:
    with np.errstate(all="ignore"):
        S = np.where(hidden, -np.inf, Q @ K.T * scale)
        m = np.max(S, axis=1, keepdims=True, initial=-np.inf)
        P = np.exp(S - np.where(np.isneginf(m), 0.0, m))
        l = P.sum(axis=1, keepdims=True)
        O = P @ np.where(np.isfinite(V), V, 0.0)
        for key, column in np.argwhere(~np.isfinite(V)):  # 0 * NaN is NaN, unless hidden
            O[:, column] += np.where(hidden[:, key], 0.0, P[:, key] * V[key, column])
        out = np.where(l == 0, 0.0, O / l)
        return out, (m + np.log(l))[:, 0]
