"""Pictures: their numbers against the closed forms, and each one drawn, small and unclipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simattn import figures, plot, tiling
from simattn.device import DEVICES
from simattn.iomodel import predict
from simattn.trace import record

pytest.importorskip("matplotlib", reason="the pictures need the extra 'plot'")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

PICTURES = Path(__file__).parent.parent / "examples" / "pictures"


def traces():
    x = np.random.default_rng(0).standard_normal((16, 8)).astype("f4")
    return [record(v, x, x, x, block_q=4, block_k=4, sram_bytes=1024) for v in plot.ORDERS]


DRAWN = {
    "traffic-n": lambda: plot.traffic_n(100 * 1024),
    "traffic-sram": lambda: plot.traffic_sram(budgets=[8192 << i for i in range(7)]),
    "tile-size": plot.tile_size,
    "heatmap": lambda: plot.heatmap(50 * 1024, n=1024),
    "heatmap, causal and tiny": lambda: plot.heatmap(20_000, n=100, d=16, is_causal=True),
    "roofline": lambda: plot.roofline(DEVICES["h100"], n=4096, d=64, heads=16, batch=4),
    "occupancy": lambda: plot.occupancy(traces(), DEVICES["classroom"]),
    "slopes": plot.slopes,
}


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_are_drawn_with_units_and_without_clipping(name: str, tmp_path: Path) -> None:
    fig = DRAWN[name]()
    path = tmp_path / "picture.png"
    plot.save(fig, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 150_000
    labels = [axes.get_xlabel() + axes.get_ylabel() for axes in fig.axes]
    assert any(labels)
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    width, height = canvas.get_width_height()
    for text in fig.findobj(Text):
        if text.get_visible() and text.get_text():
            box = text.get_window_extent(canvas.get_renderer())
            if (
                0 <= box.x0 <= width and 0 <= box.y0 <= height
            ):  # ticks outside the view aren't drawn
                assert (box.x1, box.y1) <= (width + 2, height + 2), text.get_text()


def test_traffic_against_n_is_the_planners() -> None:
    found = plot.traffic_by_rows([256, 1024], plot.ORDERS, 50_000, d=64, dtype="float16")
    tiles = tiling.best("kv_outer", 50_000, n=1024, d=64, dtype="float16")
    assert found["kv_outer"][1] == tiles.counts.traffic.total_bytes
    assert found["q_outer"][1] < found["kv_outer"][1]
    assert plot.best_bytes("q_outer", 100, n=64, d=64) is None


def test_the_loop_orders_cross_under_the_papers_rule_alone() -> None:
    """N 4096, d 64: between 6 d^2 and 8 d^2 elements (d^2 is 8192 bytes of fp16)."""
    budgets = plot.sram_budgets(64, 2)
    shape = {"n": 4096, "d": 64, "dtype": "float16"}
    for rule in ("seed", "best"):
        moved, crossed = plot.by_sram(budgets, rule, **shape)
        assert crossed == []
        pairs = zip(moved["q_outer"], moved["kv_outer"], strict=True)
        assert all(q < kv for q, kv in pairs if q and kv)
    _, (crossing,) = plot.by_sram(budgets, "paper", **shape)
    assert crossing.winner == "kv_outer"
    assert 6 * 8192 <= crossing.before < crossing.after <= 8 * 8192


def test_rule_tiles_are_the_rules() -> None:
    M = 32768  # elements
    want = predict("kv_outer", n=4096, d=64, block_q=64, block_k=128, dtype="float16")
    got = plot.rule_bytes("paper", "kv_outer", 2 * M, n=4096, d=64, dtype="float16")
    assert got == want.traffic.total_bytes


def test_tile_size_is_the_papers_figure() -> None:
    shape = {"n": 1024, "d": 64, "heads": 16, "batch": 64, "dtype": "float16"}
    assert [round(x, 2) for x in plot.by_block_k([64, 128, 256, 512], **shape)] == [
        6.98, 3.70, 2.05, 1.23,
    ]  # fmt: skip


def test_heat_map_numbers() -> None:
    moved, needed = plot.traffic_grid("q_outer", [16, 32], [16, 48], n=100, d=8)
    counts = predict("q_outer", n=100, d=8, block_q=32, block_k=48)
    assert moved[1, 1] == counts.traffic.total_bytes
    assert needed[1, 1] == counts.peak_sram_bytes
    sizes = plot.sizes_that_fit(100 * 1024, 16, n=4096, d=64, dtype="float16")
    best = tiling.best("kv_outer", 100 * 1024, n=4096, d=64, dtype="float16")
    assert sizes[-1] >= best.block_k
    assert len(sizes) <= 64
    with pytest.raises(plot.PlotError, match="--sram 100: fits no tiles, must be at least"):
        plot.heatmap(100)


def test_roofline_points_are_at_or_below_the_roof() -> None:
    machine = DEVICES["h200"]
    shape = {"n": 2048, "d": 64, "heads": 8}
    for p in plot.placed(machine, plot.ORDERS, dtype="float16", **shape).values():
        reached = p.floor.matmul_flops / p.floor.seconds
        roof = min(
            machine.matmul_flops_per_s["float16"],
            p.floor.flops_per_l2_byte * machine.l2_bytes_per_s,
            p.floor.flops_per_dram_byte * machine.dram_bytes_per_s,
        )
        assert reached <= roof * (1 + 1e-12)


def test_occupancy_reaches_the_peak_and_ends_empty() -> None:
    for trace in traces():
        times, series = plot.occupancy_of(trace, DEVICES["classroom"])
        total = [sum(column) for column in zip(*series.values(), strict=True)]
        assert max(total) == trace.counts.peak_sram_bytes
        assert total[-1] == 0
        assert times == sorted(times)


def test_slopes_picture_is_the_figures() -> None:
    texts = " ".join(text.get_text() for text in plot.slopes().axes[0].texts)
    for row in figures.saha_ye()[:2]:
        assert f"slope {row['ours']:.2f}" in texts


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(plot.PlotError, match=r"needs matplotlib.*simattn\[plot\]"):
        plot.tile_size()


def test_pictures_of_the_readme_are_small() -> None:
    for path in PICTURES.glob("*"):
        assert path.suffix == ".png"
        assert path.stat().st_size < 150_000
