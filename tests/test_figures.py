"""Published figures: ours against values worked out here by hand, and the verdicts on each."""

from __future__ import annotations

import math

import numpy as np
import pytest

from simattn import exact, figures
from simattn.rescales import count_rescales
from simattn.run import row_softmax
from simattn.topk import softmax_topk

FIELDS = ["id", "source", "printed", "ours", "ratio", "unit", "how"]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    found = [row for item in figures.ITEMS.values() for row in item()]
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row for row in found}


def test_every_row_is_whole(rows) -> None:
    for row in rows.values():
        assert list(row) == FIELDS
        assert row["ratio"] == row["ours"] / row["printed"]
        assert row["how"].split(":")[0] in ("counted", "closed form", "computed")
        assert math.isfinite(row["ours"])


def ours(rows, name: str) -> float:
    return rows[name]["ours"]


def test_flash_attention_figure_2(rows) -> None:
    N, d, programs = 1024, 64, 1024

    def gb(elems: float) -> float:
        return 2 * elems * programs / 1e9

    standard = 4 * N * N + 4 * N * d + 7 * N * N + 8 * N * d
    assert ours(rows, "fa1.fig2-left.standard.traffic") == gb(standard)
    assert round(gb(standard), 1) == 25.2

    def flash(Bc: int, backward: bool) -> float:
        Tc = math.ceil(N / Bc)
        total = 3 * N * d + 2 * N + Tc * (3 * N * d + 4 * N)
        return gb(total + backward * (7 * N * d + Tc * (5 * N * d + 2 * N)))

    for Bc in (64, 128, 256, 384, 512, 1024):
        name = f"fa1.fig2-left.flash.traffic.bc{Bc}"
        assert ours(rows, name) == flash(Bc, backward=True)
        assert round(ours(rows, name), 2) == rows[name]["printed"]
    for Bc in (64, 128, 256, 512):
        name = f"fa1.fig2-middle.forward.bc{Bc}"
        assert ours(rows, name) == flash(Bc, backward=False)
        assert round(ours(rows, name), 2) == rows[name]["printed"]
    assert rows["fa1.fig2-left.flash.traffic"]["ratio"] < 1.05
    assert round(ours(rows, "fa1.fig2-left.standard.flops")) == 825
    assert round(ours(rows, "fa1.fig2-left.flash.flops")) == 962
    assert ours(rows, "fa1.fig2-left.standard.traffic-with-mask-and-dropout") == pytest.approx(
        42.4, abs=0.05
    )


def test_time_floors_are_below_the_printed_times(rows) -> None:
    for name in ("standard", "flash"):
        assert rows[f"fa1.fig2-left.{name}.time"]["ratio"] < 1


def test_table_21_is_reproduced_sixteen_of_sixteen(rows) -> None:
    table = [row for name, row in rows.items() if name.startswith("fa1.table21")]
    assert len(table) == 16
    assert all(abs(row["ours"] - row["printed"]) <= 0.5 for row in table)
    assert ours(rows, "fa1.table21.flash.n512") == 104.5


def test_softmax_accesses(rows) -> None:
    for name, accesses in (("naive", 3), ("safe", 4), ("online", 3), ("safe.top-k", 5),
                           ("online.top-k", 4), ("fused.top-k", 1)):  # fmt: skip
        assert ours(rows, f"softmax.{name}") == accesses == rows[f"softmax.{name}"]["printed"]


@pytest.mark.parametrize("algorithm", ["naive", "safe", "online", "fused"])
def test_top_k_is_the_top_of_the_softmax(algorithm: str) -> None:
    x = np.random.default_rng(1).standard_normal((5, 33)).astype(np.float32)
    top, _ = softmax_topk(x, 4, algorithm=algorithm, block_q=2, block_k=7)
    want = -np.sort(-row_softmax(x).out, axis=1)[:, :4]
    np.testing.assert_allclose(top, want, rtol=2e-6)


def test_flash_attention_2(rows) -> None:
    N, d, Tr = 1024, 64, 16
    assert ours(rows, "fa2.forward.traffic") == 2 * N * d + N + 2 * N * d * Tr
    assert ours(rows, "fa2.divisions.q_outer") == 1
    assert ours(rows, "fa2.divisions.q_outer_each") == 4


def test_rescales_stay_exact_whatever_the_threshold() -> None:
    rng = np.random.default_rng(2)
    q, k, v = 3 * rng.standard_normal((20, 6)), rng.standard_normal((90, 6)), rng.random((90, 5))
    want, _ = exact.attention(q, k, v)
    kept = []
    for octaves in (0.0, 1.0, 2.0, 8.0, 1e9):
        r = count_rescales(q, k, v, block_k=8, threshold_octaves=octaves)
        np.testing.assert_allclose(r.out, want, rtol=1e-12, atol=1e-12)
        assert r.visits == 20 * 11
        assert r.largest_weight <= 2 ** min(octaves, 60) * (1 + 1e-12)
        kept.append(r.kept)
    assert kept[0] == r.rises  # a threshold of 0 keeps every rise
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 0


def test_flash_attention_4_on_input_that_is_given() -> None:
    rng = np.random.default_rng(4)
    given = {name: rng.standard_normal((2, 3, 128, 8)) for name in "qkv"}
    rows = [r for r in figures.flash_attention_4(given) if ".input." in r["id"]]
    assert len(rows) == 2
    assert all(0 <= r["ours"] <= 100 for r in rows)


def test_saha_and_ye(rows) -> None:
    assert ours(rows, "saha-ye.slope.above") == pytest.approx(-1, abs=0.03)
    assert ours(rows, "saha-ye.slope.below") == pytest.approx(-0.5, abs=0.03)
    # 4 N^2 d^2 / M of whole rows meets 4 sqrt(3) N^2 d / sqrt(M) of squares at M = d^2 / 3
    assert ours(rows, "saha-ye.crossing") == pytest.approx(1 / 3, rel=0.2)


def test_sawtooth_and_ring(rows) -> None:
    assert ours(rows, "sawtooth.l2.measured") == 107_741_184
    assert ours(rows, "sawtooth.l2.formula") == 8 * 2048 * (1 + 2048 // 64)
    assert ours(rows, "sawtooth.l2.causal") == 8 * 2048 * (2048 / 128 + 1.5)
    assert ours(rows, "ring.block.nvlink") == pytest.approx(1.040)
    assert ours(rows, "ring.block.infiniband") == pytest.approx(24.96)
    assert round(rows["ring.block.infiniband"]["ratio"], 2) == 1.02


def test_what_does_not_reproduce_says_so(rows) -> None:
    lines = figures.failures(list(rows.values()))
    named = {line.split(":")[0] for line in lines}
    assert named == {
        "fa1.fig2-left.standard.traffic", "fa1.fig2-left.standard.flops",
        "fa1.fig2-left.flash.flops", "fa1.fig2-left.standard.time", "fa1.fig2-left.flash.time",
        "fa3.rmse.standard", "fa3.rmse.flash", "fa3.rmse.ratio", "sawtooth.l2.causal",
    }  # fmt: skip
    for name, row in rows.items():  # and what is far off is among them, or compares shares
        if abs(row["ratio"] - 1) > 0.12:
            assert name in named or name == "saha-ye.crossing"
