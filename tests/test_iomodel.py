"""Closed forms: against the runs, an independent witness, and the papers' formulas."""

from __future__ import annotations

import ast
import inspect
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import windows

import simattn
from simattn import iomodel, predict, tilesums
from simattn.dtypes import DTYPES
from simattn.iomodel import FORMS
from simattn.masks import TileGrid
from simattn.tilesums import Grid, TileSums, floor_sum
from simattn.variants import VARIANTS

WITNESS = json.loads((Path(__file__).parent / "traffic_witness.json").read_text())


def witness_id(case: dict) -> str:
    return "-".join(str(case[key]) for key in ("variant", "n", "s", "block_q", "causal", "splits"))


@pytest.mark.parametrize("case", WITNESS, ids=witness_id)
def test_run_form_and_witness_agree(case: dict) -> None:
    n, s, d, e = (case[key] for key in "nsde")
    options = {key: case[key] for key in ("block_q", "block_k", "splits")}
    form = predict(
        case["variant"], n=n, n_k=s, d=d, dv=e, is_causal=case["causal"], **options
    ).traffic
    q, k, v = np.ones((n, d), "f4"), np.ones((s, d), "f4"), np.ones((s, e), "f4")
    run = simattn.attention(q, k, v, variant=case["variant"], is_causal=case["causal"], **options)
    assert form.reads == run.traffic.reads == case["reads"]
    assert form.writes == run.traffic.writes == case["writes"]


@given(st.data())
def test_forms_equal_runs_in_every_column(data) -> None:
    """Shapes and masks, without values: the loop nests are run on zeros."""
    n, s = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 40))
    d, e = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    options = {
        "variant": data.draw(st.sampled_from(list(VARIANTS))),
        "block_q": data.draw(st.integers(1, 45)),
        "block_k": data.draw(st.integers(1, 45)),
        "splits": data.draw(st.integers(1, 9)),
        "is_causal": data.draw(st.booleans()),
        "window_size": data.draw(windows),
        "dtype": data.draw(st.sampled_from(list(DTYPES))),
        "return_lse": data.draw(st.booleans()),
    }
    run = simattn.attention(np.zeros((n, d)), np.zeros((s, d)), np.zeros((s, e)), **options)
    form = predict(n=n, n_k=s, d=d, dv=e, **options)
    assert run.traffic == form.traffic
    assert run.counts.sram == form.sram
    assert run.flops == form.flops
    assert run.peak_sram_bytes == form.peak_sram_bytes


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 40), st.integers(1, 25))
def test_floor_sum(count, slope, offset, modulus) -> None:
    assert floor_sum(count, slope, offset, modulus) == sum(
        (slope * i + offset) // modulus for i in range(count)
    )


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 20), st.integers(1, 20), windows)
def test_sums_over_visited_tiles(n, s, block_q, block_k, window) -> None:
    grid = TileGrid(n, s, block_q, block_k, window)
    visited = [(i, j) for i in grid.row_tiles() for j in grid.key_tiles_seen_by(i)]
    sums = TileSums.of(Grid(n, s, block_q, block_k, *window))

    def rows(t: slice) -> int:
        return t.stop - t.start

    assert sums.keys == sum(rows(j) for _, j in visited)
    assert sums.rows == sum(rows(i) for i, _ in visited)
    assert sums.pairs == sum(rows(i) * rows(j) for i, j in visited)
    assert sums.keys_once == sum(rows(j) for j in grid.key_tiles_seen())


# Formulas from the literature, each with its source


@pytest.mark.parametrize(("N", "d", "Bc"), [(1024, 64, 384), (4096, 128, 100), (7, 3, 2)])
def test_formulas_of_the_papers(N: int, d: int, Bc: int) -> None:
    def total(variant: str, block_q: int, **options) -> int:
        return predict(
            variant, n=N, d=d, block_q=block_q, block_k=Bc, **options
        ).traffic.total_elems

    Tc = -(-N // Bc)
    # FlashAttention (arXiv 2205.14135), Algorithms 0 and 1
    assert total("standard_row", N) == 4 * N * N + 4 * N * d
    assert total("kv_outer", min(Bc, d)) == 3 * N * d + 2 * N + Tc * (3 * N * d + 4 * N)
    # FlashAttention-2 (arXiv 2307.08691), Algorithm 1
    Tr = -(-N // 64)
    assert total("q_outer", 64, return_lse=True) == 2 * N * d + N + 2 * N * d * Tr
    assert total("q_outer", 64) == total("q_outer_each", 64)
    # Untiled, summed over all rows
    Bc, Tc = 1, N
    assert total("q_outer", 1) == 2 * N * N * d + 2 * N * d
    assert total("kv_outer", 1) == 3 * N * N * d + 4 * N * N + 3 * N * d + 2 * N


def test_accesses_per_element_of_softmax() -> None:
    """3, 4 and 3 (Milakov & Gimelshein, arXiv 1805.02867)."""
    for algorithm, accesses in (("naive", 3), ("safe", 4), ("online", 3)):
        counts = simattn.predict_softmax(algorithm, rows=10, columns=100)
        assert counts.traffic.total_elems == accesses * 10 * 100


@pytest.mark.parametrize("variant", FORMS)
def test_causal_traffic_approaches_half(variant: str) -> None:
    """Of the streamed part; ``standard`` moves the full matrices, masked or not."""
    shape = {"n": 2**14, "d": 64, "block_q": 64, "block_k": 64}
    ratio = (
        predict(variant, is_causal=True, **shape).traffic.total_elems
        / predict(variant, **shape).traffic.total_elems
    )
    assert ratio == 1 if variant.startswith("standard") else 0.5 < ratio < 0.52


@pytest.mark.parametrize("variant", FORMS)
def test_ten_million_rows_take_milliseconds(variant: str) -> None:
    def ask(n: int) -> float:
        start = time.perf_counter()
        predict(variant, n=n, d=64, block_q=1, block_k=1, is_causal=True, window_size=(12345, -1))
        return time.perf_counter() - start

    assert min(ask(10**7) for _ in range(5)) < 0.005
    assert min(ask(2**48) for _ in range(5)) < 0.005


def test_numpy_integers_do_not_overflow() -> None:
    n, d, heads = np.int32(4096), np.int32(64), np.int32(64)
    counts = predict("q_outer", n=n, d=d, heads=heads, block_q=np.int8(64), block_k=np.int64(64))
    assert counts.flops.matmul == 64 * 4 * 4096**2 * 64
    assert type(counts.flops.matmul) is type(counts.traffic.reads["K"]) is int


@pytest.mark.parametrize(
    "wrong", [{"rows": -3}, {"block_q": 0}, {"dtype": "zz"}, {"columns": 1.5}, {"algorithm": "x"}]
)
def test_bad_softmax_shapes(wrong: dict) -> None:
    good = {"algorithm": "online", "rows": 4, "columns": 4}
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name} .*: must be"):
        simattn.predict_softmax(**(good | wrong))


def test_totals_multiply_by_batch_and_query_heads() -> None:
    one = predict("kv_outer", n=50, d=8, block_q=16, block_k=8)
    many = predict("kv_outer", n=50, d=8, block_q=16, block_k=8, heads=6, kv_heads=2, batch=5)
    assert many.traffic.total_bytes == 30 * one.traffic.total_bytes
    assert many.flops.exp == 30 * one.flops.exp
    assert many.peak_sram_bytes == one.peak_sram_bytes


def test_closed_forms_import_nothing_of_the_simulator() -> None:
    for module, allowed in (
        (iomodel, {"simattn.checks", "simattn.counts", "simattn.dtypes", "simattn.tilesums"}),
        (tilesums, set()),
    ):
        tree = ast.parse(inspect.getsource(module))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {m for m in imported if m.startswith("simattn")} == allowed


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"variant": "flash"}, "variant 'flash': must be one of standard_safe"),
        ({"dtype": "int8"}, "dtype 'int8': must be one of float16"),
        ({"block_q": 0}, "block_q 0: must be a whole number, at least 1"),
        ({"n": -1}, "n -1: must be a whole number, at least 0"),
        ({"d": 0}, "d 0: must be a whole number, at least 1"),
        ({"window_size": (-2, 0)}, r"window_size \(-2, 0\): must be two whole numbers, each at"),
        ({"heads": 3, "kv_heads": 2}, "kv_heads 2: must divide heads 3"),
        ({"n": 2.5}, "n 2.5: must be a whole number"),
        ({"is_causal": "no"}, "is_causal 'no': must be True or False"),
        ({"window_size": (1.5, 2)}, r"window_size \(1.5, 2\): must be two whole numbers"),
        ({"splits": 2.5}, "splits 2.5: must be a whole number"),
        ({"variant": ["q_outer"]}, r"variant \['q_outer'\]: must be one of"),
        ({"splits": 0}, "splits 0: must be a whole number, at least 1"),
    ],
)
def test_bad_shapes(wrong: dict, message: str) -> None:
    good = {"variant": "q_outer", "n": 4, "d": 4, "block_q": 2, "block_k": 2}
    with pytest.raises(ValueError, match=f"^{message}"):
        predict(**(good | wrong))
