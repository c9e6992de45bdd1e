"""Tiles of the width as well: exact, counted, within three tiles, and flatter in M."""

from __future__ import annotations

import numpy as np
import pytest
import tolerances
from hypothesis import given
from hypothesis import strategies as st

import simattn
import simattn.tiling
from simattn import exact
from simattn.bounds import error_bound
from simattn.dtypes import DTYPES
from simattn.iomodel_square import predict_square
from simattn.square_tiles import attention_square, largest_block

windows = st.one_of(st.just((-1, -1)), st.tuples(st.integers(-1, 9), st.integers(-1, 9)))


@given(
    n=st.integers(0, 14), s=st.integers(0, 14), d=st.integers(1, 7), e=st.integers(1, 7),
    block=st.integers(1, 8), causal=st.booleans(), window=windows, seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(tuple(DTYPES)),
)  # fmt: skip
def test_exact_and_counted(n, s, d, e, block, causal, window, seed, dtype) -> None:
    rng = np.random.default_rng(seed)
    storage = DTYPES[dtype]
    q, k, v = (storage.round(rng.standard_normal(shape)) for shape in ((n, d), (s, d), (s, e)))
    mask = {"is_causal": causal, "window_size": window}
    run = attention_square(q, k, v, block=block, dtype=dtype, **mask)
    assert run.counts == run.predicted
    q, k, v = (tolerances.stored(x, storage) for x in (q, k, v))
    out, _ = exact.attention(q, k, v, **mask)
    bound, _ = error_bound(
        q, k, v, storage=storage, variant="standard_safe", block_k=block, scale=d**-0.5
    )
    assert np.abs(run.out.astype(np.float64) - out).max(initial=0) <= bound


def test_a_hidden_key_takes_no_part() -> None:
    q = np.ones((3, 2))
    v = np.array([[1.0, 2.0], [3.0, 4.0], [np.nan, np.inf]])
    out = attention_square(q, q, v, block=2, is_causal=True).out
    assert np.isfinite(out[:2]).all()
    assert not np.isfinite(out[2]).any()


@pytest.mark.parametrize("t", [1, 2, 4, 8, 16])
def test_three_square_tiles_fit(t: int) -> None:
    M = 3 * t * t + 3 * t
    assert largest_block(M) == t
    x = np.ones((48, 16), np.float32)
    run = attention_square(x, x, x, block=t, sram_bytes=4 * M)
    assert run.counts.peak_sram_bytes <= 4 * M
    assert run.counts.traffic.total_elems == 4 * 48 * 48 * 16 // t + 48 * 48 + 48 * 16


def test_peak_is_what_it_needs() -> None:
    x = np.ones((20, 9), np.float16)
    peak = attention_square(x, x, x, block=6).counts.peak_sram_bytes
    with pytest.raises(simattn.SRAMCapacityError):
        attention_square(x, x, x, block=6, sram_bytes=peak - 1)


def test_beats_whole_rows_where_sram_is_below_d_squared() -> None:
    """And loses above: the crossing that the lower bound foretells."""
    N, d = 4096, 256
    for M, wins in ((d * d // 16, True), (d * d, False), (4 * d * d, False)):
        rows = simattn.tiling.best("q_outer", 4 * M, n=N, d=d, granule=1)
        square = predict_square(n=N, d=d, block=largest_block(M))
        assert rows is not None
        assert (square.traffic.total_elems < rows.counts.traffic.total_elems) is wins
