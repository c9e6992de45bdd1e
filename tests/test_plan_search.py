"""The planner finds what trying every pair of tiles finds, and is quick at a million rows."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simattn import tiling
from simattn.iomodel import FORMS, predict

windows = st.one_of(
    st.just((-1, -1)), st.tuples(st.integers(-1, 12), st.integers(-1, 12))
)  # as in the conformance suite


def brute_force(variant, sram_bytes, n, d, granule, **shape):
    """The best of all granule multiples: fewest bytes, then largest area, then largest block_q."""
    best = None
    for Br in [*range(granule, n, granule), max(n, 1)]:
        for Bc in [*range(granule, shape["n_k"], granule), max(shape["n_k"], 1)]:
            counts = predict(variant, n=n, d=d, block_q=Br, block_k=Bc, **shape)
            if sram_bytes is None or counts.peak_sram_bytes <= sram_bytes:
                rank = counts.traffic.total_bytes, -Br * Bc, -Br
                best = min(best or (rank, Br, Bc), (rank, Br, Bc))
    return best and best[1:]


@pytest.mark.parametrize("variant", FORMS)
@given(data=st.data())
def test_equals_brute_force(variant: str, data: st.DataObject) -> None:
    draw = data.draw
    n = draw(st.integers(0, 30))
    shape = {
        "n_k": draw(st.one_of(st.just(n), st.integers(0, 30))),
        "dv": draw(st.integers(1, 4)),
        "dtype": draw(st.sampled_from(["float16", "float32"])),
        "is_causal": draw(st.booleans()),
        "window_size": draw(windows),
        "return_lse": draw(st.booleans()),
        "splits": draw(st.sampled_from([None, 1, 3, 9])),
    }
    d, granule = draw(st.integers(1, 8)), draw(st.sampled_from([1, 3, 5]))
    sram = draw(st.one_of(st.none(), st.integers(20, 6000)))
    found = tiling.best(variant, sram, n=n, d=d, granule=granule, **shape)
    want = brute_force(variant, sram, n, d, granule, **shape)
    assert (found and (found.block_q, found.block_k)) == want


@pytest.mark.parametrize("sram_kib", [32, 163, 227])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("variant", ["q_outer", "kv_outer", "two_pass", "split_kv"])
def test_a_million_rows_take_under_50_ms(variant: str, is_causal: bool, sram_kib: int) -> None:
    def once() -> float:
        start = time.perf_counter()
        assert tiling.best(
            variant, sram_kib * 1024, n=10**6, d=64, dtype="float16", is_causal=is_causal
        )
        return time.perf_counter() - start

    assert min(once() for _ in range(5)) < 0.05
