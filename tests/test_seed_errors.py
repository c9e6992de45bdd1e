"""Every wrong formula of the tutorials and papers fails the property that the right one passes.

The property is always the same: the result is softmax attention, or the count is what moves. Each
test states the right form and the wrong one side by side.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import simattn
from simattn import exact, tiling

inf = np.inf


@st.composite
def matrices(draw, *, rows: int = 3, keys: int = 6):
    """q [rows, 4], k [keys, 4], v [keys, 3], with scores whose maxima rise along the keys."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    q, k, v = (rng.standard_normal((r, c)) for r, c in ((rows, 4), (keys, 4), (keys, 3)))
    q, k = np.abs(q) + 0.5, (np.abs(k) + 0.5) * np.arange(1, keys + 1)[:, None] / 2
    return q, k, v + 3


def right(q, k, v, scale=None):
    return exact.attention(q, k, v, scale=scale)[0]


def is_exact(out, q, k, v, scale=None) -> bool:
    reference = right(q, k, v, scale)
    return out.shape == reference.shape and bool(np.allclose(out, reference, rtol=0, atol=1e-9))


def holds_and_fails(form: Callable, q, k, v, scale=None) -> None:
    """``form(q, k, v, wrong)`` is exact as it should be, and not with its printed slip."""
    assert is_exact(form(q, k, v, False), q, k, v, scale)
    assert not is_exact(form(q, k, v, True), q, k, v, scale)


# 1. The KV-outer update multiplies l by l where it must multiply o


def kv_outer_untiled(q, k, v, wrong: bool):
    n = len(q)
    m, l, o = np.full(n, -inf), np.zeros(n), np.zeros((n, v.shape[1]))
    for j in range(len(k)):
        for i in range(n):
            x = q[i] @ k[j] / np.sqrt(q.shape[1])
            m_new = max(m[i], x)
            c, p = np.exp(m[i] - m_new), np.exp(x - m_new)
            l_new = l[i] * c + p
            o[i] = ((l[i] if wrong else o[i]) * (l[i] * c) + p * v[j]) / l_new
            m[i], l[i] = m_new, l_new
    return o


@given(matrices(rows=2))
def test_kv_outer_multiplies_the_running_output(qkv) -> None:
    holds_and_fails(kv_outer_untiled, *qkv)


# 2. The tiled formulas, and the inverted rescale of FlashAttention-2's printed Algorithm 1


def tiled(q, k, v, slip: str | None, Bc: int = 2):
    scale = 1 / np.sqrt(q.shape[1])
    n = len(q)
    m, l, O = np.full(n, -inf), np.zeros(n), np.zeros((n, v.shape[1]))
    previous = np.zeros_like(O)
    last = len(k) // Bc * Bc if slip == "last tile" else len(k)
    for j in range(0, last, Bc):
        S = q @ k[j : j + Bc].T * scale
        m_new = np.maximum(m, S.max(axis=1))
        c, P = np.exp(m - m_new), np.exp(S - m_new[:, None])
        l = (c * (j > 0) if slip == "l" else c * l) + P.sum(axis=1)
        if slip == "only the previous tile":
            O = previous * c[:, None] + P @ v[j : j + Bc]
            previous = P @ v[j : j + Bc]
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                factor = np.where(l > 0, 1 / c, 0) if slip == "inverse" and j else c
            O = O * factor[:, None] + P @ v[j : j + Bc]
        m = m_new
    return O / l[:, None]


@pytest.mark.parametrize("slip", ["l", "only the previous tile", "inverse", "last tile"])
@given(matrices(keys=7))  # four key tiles, the last one short
def test_tiled_formulas(slip: str, qkv) -> None:
    holds_and_fails(lambda q, k, v, wrong: tiled(q, k, v, slip if wrong else None), *qkv)


# 3. The KV-outer traffic, which turns the ranking of the loop orders


@pytest.mark.parametrize(("N", "d"), [(8, 4), (64, 16), (33, 7)])
def test_kv_outer_traffic_per_unit(N: int, d: int) -> None:
    x = np.ones((N, d))
    counted = {
        v: simattn.attention(x, x, x, variant=v, block_q=1, block_k=1).traffic.total_elems
        for v in ("q_outer", "kv_outer")
    }
    initial = N * d + 2 * N  # O, m and l, written once before the loops
    per_unit = (
        2 * d + N * d + 2 * N + N * d + N * d + 2 * N
    )  # k, v; q; m, l; O in and out; m, l out
    printed = 2 * d + N * d + 2 * N
    assert counted["kv_outer"] - initial == N * per_unit
    assert counted["kv_outer"] - initial != N * printed
    assert counted["q_outer"] == N * (2 * N * d + 2 * d)
    assert N * printed < counted["q_outer"] < counted["kv_outer"]  # as printed, it would win


# 4. The tile rule: names swapped, and S not charged


def test_tile_rule() -> None:
    M, d = 16384, 64
    block_q, block_k = tiling.paper_rule(M, d)
    assert (block_q, block_k) == (64, 64)
    assert tiling.seed_rule(M * 2, d) == tuple(reversed(tiling.paper_rule(M * 2, d)))
    without_S = block_q * d + 2 * block_k * d + block_q * d  # Q, K, V, O: what the rule adds up
    assert without_S == M
    assert without_S + block_q * block_k == 5 * M // 4
    counts = simattn.predict("q_outer", n=512, d=d, block_q=block_q, block_k=block_k)
    assert counts.peak_sram_bytes == 4 * (5 * M // 4 + 3 * block_q)  # and m, l, m_new


# 5. Which loop order is which paper's


def test_the_papers_loop_orders_by_their_totals() -> None:
    N, d, B = 256, 16, 32
    T = N // B
    total = {
        v: simattn.predict(v, n=N, d=d, block_q=B, block_k=B).traffic.total_elems
        for v in ("q_outer", "kv_outer")
    }
    assert total["kv_outer"] == 3 * N * d + 2 * N + T * (
        3 * N * d + 4 * N
    )  # FlashAttention, Alg. 1
    assert total["q_outer"] == 2 * N * d + 2 * N * d * T  # FlashAttention-2, Alg. 1, without L


# 6. Loops to d_k, e^x - m for e^(x - m), V transposed


def written_out(q, k, v, slip: str | None):
    out = np.zeros((len(q), v.shape[1]))
    last = min(q.shape[1], len(k)) if slip == "loop to d" else len(k)
    for i in range(len(q)):
        x = q[i] @ k.T / np.sqrt(q.shape[1])
        m = x[:last].max()
        weight = np.exp(x) - m if slip == "e^x - m" else np.exp(x - m)
        values = v.T.reshape(v.shape) if slip == "V transposed" else v
        out[i] = sum(weight[j] * values[j] for j in range(last)) / weight[:last].sum()
    return out


@pytest.mark.parametrize("slip", ["loop to d", "e^x - m", "V transposed"])
@given(matrices())
def test_index_bounds_exponents_and_orientation(slip: str, qkv) -> None:
    holds_and_fails(lambda q, k, v, wrong: written_out(q, k, v, slip if wrong else None), *qkv)


# 7. Maximum and sum fused without rescaling


def row_softmax(x, wrong: bool):
    m, l = -inf, 0.0
    for value in x:
        m_new = max(m, value)
        l = (l if wrong else l * np.exp(m - m_new)) + np.exp(value - m_new)
        m = m_new
    return np.exp(x - m) / l


@given(st.lists(st.floats(0.01, 3), min_size=2, max_size=8))
def test_fusing_maximum_and_sum_needs_the_rescale(steps: list[float]) -> None:
    x = np.cumsum(steps)
    reference = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    np.testing.assert_allclose(row_softmax(x, wrong=False), reference, rtol=1e-12)
    assert not np.allclose(row_softmax(x, wrong=True), reference, rtol=1e-4)
    ours = simattn.row_softmax(x[None], algorithm="online").out[0]
    np.testing.assert_allclose(ours, reference, rtol=1e-12)


# 8. n // chunks drops rows and keys; also floor division of the tile count


def chunked(q, k, v, wrong: bool, q_chunks: int = 4, k_chunks: int = 3):
    def size(length: int, chunks: int) -> int:
        return length // chunks if wrong else -(-length // chunks)

    Br, Bc = size(len(q), q_chunks), size(len(k), k_chunks)
    last_key = Bc * k_chunks
    rows = [
        simattn.attention(
            q[i : i + Br], k[:last_key], v[:last_key], scale=1.0, block_q=Br, block_k=Bc
        ).out
        for i in range(0, Br * q_chunks, Br)
        if len(q[i : i + Br])
    ]
    return np.concatenate(rows)


@given(matrices(rows=13, keys=13))
def test_chunk_counts(qkv) -> None:
    holds_and_fails(chunked, *qkv, scale=1.0)
    q, k, v = qkv
    q = 0 * q  # all weights equal: the key that is lost shows in every row
    assert len(chunked(q, k, v, True)) == 12
    assert not np.allclose(chunked(q, k, v, True), right(q, k, v, scale=1.0)[:12])


# 9. The scale left out, and O(N) claimed for the arithmetic


@given(matrices())
def test_leaving_out_the_scale_is_another_function(qkv) -> None:
    q, k, v = qkv
    assert is_exact(simattn.attention(q, k, v).out, q, k, v)
    assert not is_exact(simattn.attention(q, k, v, scale=1.0).out, q, k, v)
    assert is_exact(simattn.attention(q, k, v, scale=1.0).out, q, k, v, scale=1.0)


def test_memory_is_linear_and_arithmetic_is_not() -> None:
    one, two = (simattn.predict("q_outer", n=n, d=64, block_q=64, block_k=64) for n in (1024, 2048))
    assert two.peak_sram_bytes == one.peak_sram_bytes
    assert two.flops.matmul == 4 * one.flops.matmul


# From the literature: a large negative number in place of -inf for masks


@pytest.mark.parametrize(("mask", "holds"), [(-inf, True), (-1e6, False)])
def test_masks_are_minus_infinity(mask: float, holds: bool) -> None:
    """A row that sees no key: with -1e6 its output is the mean of keys that it must not see."""
    v = np.array([[1.0], [3.0]])
    S = np.full((1, 2), mask)
    m = S.max(axis=1, keepdims=True)
    P = np.exp(S - np.maximum(m, np.finfo(float).min))
    l = P.sum(axis=1, keepdims=True)
    out = np.divide(P @ v, l, out=np.zeros((1, 1)), where=l > 0)
    ours = simattn.attention(np.ones((3, 1)), np.ones((2, 1)), v, is_causal=True).out[:1]
    assert (out == ours).all() == holds
    assert ours == 0
