"""Backward passes: gradients against float64, counts against closed forms and the papers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import simattn
from simattn import exact
from simattn.backward import BACKWARD, attention_backward
from simattn.dtypes import DTYPES
from simattn.iomodel_backward import predict_backward

windows = st.one_of(st.just((-1, -1)), st.tuples(st.integers(-1, 9), st.integers(-1, 9)))


def gradients(q, k, v, dout, scale, hidden):
    """The formulas of calculus, in float64, untiled."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    S = np.where(hidden, -np.inf, scale * q @ np.swapaxes(k, -1, -2))
    m = S.max(axis=-1, keepdims=True, initial=-1e300)
    P = np.exp(S - m)
    l = P.sum(axis=-1, keepdims=True)
    P = np.divide(P, l, where=l > 0, out=np.zeros_like(P))
    dP = dout @ np.swapaxes(v, -1, -2)
    dS = scale * P * (dP - (P * dP).sum(axis=-1, keepdims=True))
    return dS @ k, np.swapaxes(dS, -1, -2) @ q, np.swapaxes(P, -1, -2) @ dout


@pytest.mark.parametrize("variant", BACKWARD)
@given(data=st.data())
def test_gradients_and_counts(variant: str, data: st.DataObject) -> None:
    draw = data.draw
    n, s = draw(st.integers(0, 14)), draw(st.integers(0, 14))
    d, e = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    lead = draw(st.sampled_from([(), (2,), (2, 2)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(tuple(DTYPES)))
    q, k, v, dout = (
        DTYPES[dtype].round(rng.standard_normal((*lead, *shape)))
        for shape in ((n, d), (s, d), (s, e), (n, e))
    )
    options = {
        "is_causal": draw(st.booleans()),
        "window_size": draw(windows),
        "scale": draw(st.sampled_from([None, 0.0, -0.5, 2.0])),
    }
    g = attention_backward(
        q, k, v, dout, variant=variant, dtype=dtype,
        block_q=draw(st.integers(1, 8)), block_k=draw(st.integers(1, 8)), **options,
    )  # fmt: skip
    assert g.counts == g.predicted
    scale = 1 / np.sqrt(d) if options["scale"] is None else options["scale"]
    hidden = exact._hidden(np.arange(n), n, s, options["is_causal"], options["window_size"])
    # Each gradient is a sum of at most n or s products, rounded to storage at most Tc + 1 times.
    visits = 2 + (s if variant == "kv_outer_backward" else 4)
    for got, want in zip((g.dq, g.dk, g.dv), gradients(q, k, v, dout, scale, hidden), strict=True):
        size = 1 + np.abs(want).max(initial=0) + 8 * max(n, s)
        bound = visits * (DTYPES[dtype].eps + 40 * DTYPES[dtype].accumulator.eps) * size
        assert np.abs(got.astype(np.float64) - want).max(initial=0) <= bound


@pytest.mark.parametrize("variant", BACKWARD)
def test_gradient_is_the_slope_of_the_forward_pass(variant: str) -> None:
    rng = np.random.default_rng(3)
    q, k, v, dout = (rng.standard_normal((7, 3)) for _ in range(4))
    g = attention_backward(q, k, v, dout, variant=variant, block_q=3, block_k=2, is_causal=True)

    def loss(q, k, v):
        return float((dout * simattn.attention(q, k, v, is_causal=True).out).sum())

    step = 1e-6
    for name, grad in (("q", g.dq), ("k", g.dk), ("v", g.dv)):
        moved = {"q": q, "k": k, "v": v}
        for index in ((0, 0), (3, 1), (6, 2)):
            up, down = moved[name].copy(), moved[name].copy()
            up[index] += step
            down[index] -= step
            slope = (loss(**{**moved, name: up}) - loss(**{**moved, name: down})) / (2 * step)
            assert grad[index] == pytest.approx(slope, abs=1e-8)


def test_the_papers_totals() -> None:
    """FlashAttention's Algorithms 3 and 4 in elements, counted, term by term."""
    N, d, Bc = 96, 8, 16
    x = np.random.default_rng(0).standard_normal((N, d)).astype(np.float32)
    whole = attention_backward(x, x, x, x, variant="standard_backward", block_q=N, block_k=N)
    assert whole.counts.traffic.total_elems == 7 * N * N + 8 * N * d
    assert whole.forward.traffic.total_elems == 4 * N * N + 4 * N * d  # Algorithm 0
    tiled = attention_backward(x, x, x, x, block_q=8, block_k=Bc)
    Tc = N // Bc
    assert tiled.counts.traffic.total_elems == 7 * N * d + Tc * (5 * N * d + 2 * N)
    assert tiled.forward.traffic.total_elems == 3 * N * d + 2 * N + Tc * (3 * N * d + 4 * N)
    assert tiled.counts.flops.matmul == 10 * N * N * d
    assert whole.counts.flops.matmul == 8 * N * N * d


@pytest.mark.parametrize("variant", BACKWARD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_peak_is_what_it_needs(variant: str, dtype: str) -> None:
    x = np.ones((20, 3))
    options = {"variant": variant, "dtype": dtype, "block_q": 6, "block_k": 5, "is_causal": True}
    peak = attention_backward(x, x, x, x, **options).counts.peak_sram_bytes
    attention_backward(x, x, x, x, sram_bytes=peak, **options)
    with pytest.raises(simattn.SRAMCapacityError):
        attention_backward(x, x, x, x, sram_bytes=peak - 1, **options)


def test_large_problems_are_predicted_at_once() -> None:
    N, d, Bc = 10**7, 64, 128
    got = predict_backward("kv_outer_backward", n=N, d=d, block_q=64, block_k=Bc)
    assert got.traffic.total_elems == 7 * N * d + -(-N // Bc) * (5 * N * d + 2 * N)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"variant": "q_outer"}, "variant 'q_outer': must be one of"),
        ({"dout": np.ones((3, 4))}, "dout (3, 4): must have the shape of the output"),
        ({"q": np.full((4, 4), np.nan)}, "q: must be finite"),
        ({"k": np.ones((1, 4, 4)), "v": np.ones((1, 4, 4))}, "dimensions"),
        ({"block_q": 0}, "block_q 0: must be a whole number"),
    ],
)
def test_wrong_input_is_named(change: dict, says: str) -> None:
    arguments = dict.fromkeys(("q", "k", "v", "dout"), np.ones((4, 4))) | change
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        attention_backward(**arguments)
    assert "\n" not in str(caught.value)


def test_closed_forms_share_no_code_with_the_loops() -> None:
    for name in ("iomodel_backward", "iomodel", "tilesums"):
        source = (Path(simattn.__file__).parent / f"{name}.py").read_text()
        modules = {
            node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)
        }
        ours = {m for m in modules if m and m.startswith("simattn")}
        assert ours <= {
            "simattn.checks",
            "simattn.counts",
            "simattn.dtypes",
            "simattn.iomodel",
            "simattn.tilesums",
        }
