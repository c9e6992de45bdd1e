"""The oracle against rational arithmetic and against scalar loops, so that it can be trusted."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from problems import problems, windows

from simattn import exact


def one_row(q, K, V, scale, seen) -> tuple[list[float], float]:
    """Attention of one query by Python floats and math.fsum alone."""
    scores = [scale * math.fsum(a * b for a, b in zip(q, k, strict=True)) for k in K]
    scores = [x for x, visible in zip(scores, seen, strict=True) if visible]
    values = [v for v, visible in zip(V, seen, strict=True) if visible]
    if not scores:
        return [0.0] * V.shape[1], -math.inf
    top = max(scores)
    weights = [math.exp(x - top) for x in scores]
    total = math.fsum(weights)
    out = [
        math.fsum(w * v[c] for w, v in zip(weights, values, strict=True)) / total
        for c in range(V.shape[1])
    ]
    return out, top + math.log(total)


@given(problems(max_rows=8, kinds=("normal", "ties", "constant")), windows)
def test_equals_scalar_loops(p, window) -> None:
    options = {key: p.options[key] for key in ("is_causal", "scale")}
    out, L = exact.attention(p.q, p.k, p.v, window_size=window, **options)
    heads, kv_heads = math.prod(p.q.shape[:-2]), math.prod(p.k.shape[:-2])
    q = p.q.reshape(heads, *p.q.shape[-2:])
    k, v = (x.reshape(kv_heads, *x.shape[-2:]) for x in (p.k, p.v))
    n, s, d = q.shape[1], k.shape[1], q.shape[2]
    group = heads // kv_heads
    scale = d**-0.5 if options["scale"] is None else options["scale"]
    for head in range(heads):
        for i in range(n):
            ahead = np.arange(s) - (i + s - n)
            seen = np.ones(s, bool)
            if window[0] >= 0:
                seen &= -ahead <= window[0]
            if window[1] >= 0:
                seen &= ahead <= window[1]
            if options["is_causal"]:
                seen &= ahead <= 0
            right, right_L = one_row(q[head, i], k[head // group], v[head // group], scale, seen)
            got = out.reshape(heads, n, v.shape[2])[head, i]
            np.testing.assert_allclose(got, right, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(
                L.reshape(heads, n)[head, i], right_L, rtol=1e-12, atol=1e-13
            )


@given(st.integers(1, 50))
def test_row_chunks_do_not_show(rows: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((50, 4)) for _ in range(3))
    whole = exact.attention(q, k, v, is_causal=True)
    kept, exact.ROW_CHUNK_ELEMS = exact.ROW_CHUNK_ELEMS, rows * 50
    try:
        chunked = exact.attention(q, k, v, is_causal=True)
    finally:
        exact.ROW_CHUNK_ELEMS = kept
    np.testing.assert_allclose(chunked[0], whole[0], rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(chunked[1], whole[1], rtol=1e-14)


def test_hidden_and_infinite() -> None:
    out, L = exact.attention([[1.0]], [[1.0], [np.nan]], [[5.0], [np.nan]], window_size=(1, -1))
    assert np.isnan(out).all()
    out, L = exact.attention(np.ones((2, 1)), [[1.0], [np.nan]], [[5.0], [np.nan]], is_causal=True)
    np.testing.assert_array_equal(out[0], [5.0])
    assert np.isnan(out[1]).all()
    out, L = exact.attention([[1.0]], [[-np.inf]], [[5.0]])
    assert (out[0, 0], L[0]) == (0.0, -np.inf)
