"""The planner: against brute force, and never worse with more SRAM."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import windows

from simattn import predict
from simattn.iomodel import FORMS
from simattn.tiling import best, paper_rule, plan, seed_rule, smallest_budget


@st.composite
def shapes(draw) -> dict:
    masked = draw(st.booleans())
    return {
        "variant": draw(st.sampled_from(list(FORMS))),
        "n": draw(st.integers(1, 40)),
        "n_k": draw(st.integers(1, 40)),
        "d": draw(st.integers(1, 8)),
        "dv": draw(st.integers(1, 8)),
        "is_causal": masked and draw(st.booleans()),
        "window_size": draw(windows) if masked else (-1, -1),
        "dtype": draw(st.sampled_from(["float16", "float32", "float64"])),
        "splits": draw(st.integers(1, 5)),
    }


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
    found = best(variant, sram, n=n, d=d, granule=granule, **shape)
    want = brute_force(variant, sram, n, d, granule, **shape)
    assert (found and (found.block_q, found.block_k)) == want


@pytest.mark.parametrize("sram_kib", [32, 163, 227])
@pytest.mark.parametrize("n_k", [10**6, 999_983, 10**5, 10**7])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("variant", ["q_outer", "kv_outer", "two_pass", "split_kv"])
def test_a_million_rows_take_under_50_ms(
    variant: str, is_causal: bool, n_k: int, sram_kib: int
) -> None:
    shape = {"n": 10**6, "n_k": n_k, "d": 64, "dtype": "float16", "is_causal": is_causal}

    def once() -> float:
        start = time.perf_counter()
        assert best(variant, sram_kib * 1024, **shape)
        return time.perf_counter() - start

    assert min(once() for _ in range(5)) < 0.05


@given(shapes(), st.integers(1, 8), st.lists(st.integers(1, 8000), min_size=2, max_size=6))
def test_counts_fall_or_stay_as_sram_grows(shape: dict, granule: int, budgets: list[int]) -> None:
    tiles = [best(**shape, sram_bytes=b, granule=granule) for b in sorted(budgets)]
    moved = [t.counts.traffic.total_bytes for t in tiles if t]
    assert moved == sorted(moved, reverse=True)
    assert not any(a and not b for a, b in pairwise(tiles))


@given(shapes().filter(lambda s: not s["is_causal"] and s["window_size"] == (-1, -1)),
       st.integers(1, 8))  # fmt: skip
def test_the_smallest_budget_works_and_a_byte_less_does_not(shape: dict, granule: int) -> None:
    least = smallest_budget(**shape, granule=granule)
    assert best(**shape, sram_bytes=least, granule=granule)
    assert best(**shape, sram_bytes=least - 1, granule=granule) is None


def test_the_rules_name_tiles_that_need_more_than_the_budget() -> None:
    """Both divide by 4d and leave S out: Q, K, V, O and S together reach 5M/4 and more."""
    assert seed_rule(1024, 10) == (26, 10)
    assert paper_rule(1024, 10) == (10, 26)
    M = 4 * 64 * 64
    seed, paper, optimum = plan("q_outer", 4 * M, n=4096, d=64)
    assert (paper.block_q, paper.block_k) == (64, 64)
    assert paper.counts.peak_sram_bytes == 4 * (5 * M // 4 + 3 * 64)
    assert (seed.fits, paper.fits, optimum.fits) == (False, False, True)
    assert optimum.counts.peak_sram_bytes <= 4 * M


def test_where_the_loop_orders_stand() -> None:
    """Best tiles: q_outer always moves less. Paper's rule: kv_outer does between 6d^2 and 8d^2."""
    d, N = 64, 4096
    kv_wins = []
    for quarter in range(4, 64):
        M = quarter * d * d // 4
        by_rule = {}
        for variant in ("q_outer", "kv_outer"):
            _, paper, *optimum = plan(variant, 4 * M, n=N, d=d)
            by_rule[variant] = paper.counts.traffic.total_elems
            by_rule[variant, "best"] = optimum[0].counts.traffic.total_elems if optimum else None
        if by_rule["q_outer", "best"]:
            assert by_rule["q_outer", "best"] < by_rule["kv_outer", "best"]
        if by_rule["kv_outer"] < by_rule["q_outer"]:
            kv_wins.append(M / d**2)
    assert 5.5 <= min(kv_wins) <= 6.5
    assert kv_wins == [m for m in kv_wins if m > 5.5]


def test_bad_granule() -> None:
    with pytest.raises(ValueError, match=r"^granule 0: must be at least 1"):
        best("q_outer", 1000, n=4, d=4, granule=0)
