"""The recurrence: a commutative monoid, whatever the split; and the row softmaxes."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import simattn
from simattn.dtypes import FLOAT64
from simattn.memory import HBM, SRAM
from simattn.run import SOFTMAXES
from simattn.softmax import OnlineSoftmax

ROWS, WIDTH = 3, 2
scores = st.one_of(
    st.floats(-1e4, 1e4), st.sampled_from([-inf, 0.0, 1e4, -1e4]), st.floats(-1e-300, 1e-300)
)


@st.composite
def keys(draw, most=6):
    """Scores [3, keys], some of them -inf, and values [keys, 2]."""
    count = draw(st.integers(1, most))
    S = draw(st.lists(scores, min_size=ROWS * count, max_size=ROWS * count))
    V = draw(st.lists(st.floats(-8, 8), min_size=count * WIDTH, max_size=count * WIDTH))
    return np.reshape(S, (ROWS, count)), np.reshape(V, (count, WIDTH))


class Bench:
    """An SRAM with no bound, to make states on and read them off."""

    def __init__(self) -> None:
        self.hbm, self.sram = HBM(), SRAM(FLOAT64)

    def tile(self, x: np.ndarray):
        self.hbm.place("x", np.array(x, np.float64), FLOAT64)
        return self.sram.load(self.hbm.x)

    def empty(self) -> OnlineSoftmax:
        return OnlineSoftmax.empty(self.sram, ROWS, WIDTH)

    def state(self, *parts) -> OnlineSoftmax:
        state = self.empty()
        for S, V in parts:
            state.update(self.tile(S), self.tile(V))
        return state

    def read(self, tile) -> np.ndarray:
        out = np.empty(tile.shape)
        self.hbm.place("out", out, FLOAT64)
        self.sram.store(self.hbm.out, tile)
        return out

    def result(self, state: OnlineSoftmax):
        """m, out and L."""
        m = self.read(state.m)
        with np.errstate(all="ignore"):
            return m, self.read(state.finish()), self.read(state.lse())


def assert_same(a, b) -> None:
    np.testing.assert_array_equal(a[0], b[0])  # maxima are exact
    np.testing.assert_allclose(a[1], b[1], rtol=0, atol=1e3 * FLOAT64.eps)
    np.testing.assert_allclose(a[2], b[2], rtol=8 * FLOAT64.eps, atol=1e2 * FLOAT64.eps)


def merged(bench: Bench, *states: OnlineSoftmax) -> OnlineSoftmax:
    first, *rest = states
    with np.errstate(all="ignore"):
        for state in rest:
            first.merge(state)
    return first


@given(keys(), keys(), keys())
def test_merge_is_associative_and_commutative(a, b, c) -> None:
    bench = Bench()
    left = merged(bench, merged(bench, bench.state(a), bench.state(b)), bench.state(c))
    right = merged(bench, bench.state(a), merged(bench, bench.state(b), bench.state(c)))
    swapped = merged(bench, bench.state(c), bench.state(b), bench.state(a))
    results = [bench.result(x) for x in (left, right, swapped)]
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@given(keys())
def test_the_empty_state_is_the_identity(a) -> None:
    bench = Bench()
    alone = bench.result(bench.state(a))
    for states in ((bench.empty(), bench.state(a)), (bench.state(a), bench.empty())):
        for x, y in zip(bench.result(merged(bench, *states)), alone, strict=True):
            np.testing.assert_array_equal(x, y)


@given(keys(most=12), st.data())
def test_any_split_of_the_keys_gives_the_same_result(a, data) -> None:
    S, V = a
    cuts = sorted(data.draw(st.sets(st.integers(1, S.shape[1] - 1)))) if S.shape[1] > 1 else []
    parts = list(zip(np.split(S, cuts, axis=1), np.split(V, cuts), strict=True))
    bench = Bench()
    whole = bench.result(bench.state(a))
    assert_same(bench.result(bench.state(*parts)), whole)  # one after another
    assert_same(bench.result(merged(bench, *(bench.state(p) for p in parts))), whole)  # apart
    order = data.draw(st.permutations(parts))
    assert_same(bench.result(bench.state(*order)), whole)


@given(keys(most=12))
def test_the_state_is_what_its_definition_says(a) -> None:
    S, V = a
    bench = Bench()
    m, out, L = bench.result(bench.state(a))
    for row in range(ROWS):
        seen = S[row] > -inf
        if not seen.any():
            assert (m[row], L[row]) == (-inf, -inf)
            np.testing.assert_array_equal(out[row], 0)
            continue
        top = S[row].max()
        weights = np.exp(S[row][seen] - top)
        assert m[row] == top
        np.testing.assert_allclose(L[row], top + np.log(weights.sum()), rtol=1e-14, atol=1e-14)
        np.testing.assert_allclose(out[row], weights @ V[seen] / weights.sum(), atol=1e-13)


def test_a_state_without_values_has_no_output() -> None:
    with pytest.raises(ValueError, match="no output"):
        OnlineSoftmax.empty(SRAM(FLOAT64), 1, None).finish()


# Softmaxes of whole rows

EXACT = {"naive": 50, "safe": 1e4, "online": 1e4, "row": 1e4}  # the largest |score| they take


@pytest.mark.parametrize("algorithm", SOFTMAXES)
@given(data=st.data())
def test_row_softmax_is_exact_and_counts_as_predicted(algorithm: str, data) -> None:
    rows, columns = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 9))
    most = EXACT[algorithm]
    x = np.reshape(
        data.draw(st.lists(st.floats(-most, most), min_size=rows * columns,
                           max_size=rows * columns)), (rows, columns))  # fmt: skip
    dtype = data.draw(st.sampled_from(["float64", "float32", "float16", "bfloat16"]))
    run = simattn.row_softmax(
        x, algorithm=algorithm, dtype=dtype,
        block_q=data.draw(st.integers(1, 4)), block_k=data.draw(st.integers(1, 4)),
    )  # fmt: skip
    assert run.as_predicted
    accesses = {"naive": (2, 1), "safe": (3, 1), "online": (2, 1), "row": (1, 1)}[algorithm]
    assert run.traffic.total_read_elems == accesses[0] * rows * columns
    assert run.traffic.total_write_elems == accesses[1] * rows * columns
    storage = simattn.dtypes.DTYPES[dtype]
    stored = storage.round(x).astype(np.float64)
    if columns:
        weights = np.exp(stored - stored.max(axis=1, keepdims=True))
        right = weights / weights.sum(axis=1, keepdims=True)
        u, w = storage.accumulator.eps / 2, storage.eps / 2
        bound = 4 * most * u + (columns + 8) * u + w + 2.0**-25  # of a number at most 1
        assert np.abs(run.out.astype(np.float64) - right).max(initial=0) <= bound


def test_the_naive_softmax_overflows_where_the_others_do_not() -> None:
    x = np.array([[1000.0, 999.0]])
    assert np.isnan(simattn.row_softmax(x, algorithm="naive").out).any()
    for algorithm in ("safe", "online", "row"):
        out = simattn.row_softmax(x, algorithm=algorithm).out
        np.testing.assert_allclose(out, [[1 / (1 + np.exp(-1)), 1 / (1 + np.e)]], rtol=1e-15)
