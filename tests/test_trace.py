"""Recorded runs are the same runs; Chrome's JSON adds up; the player works in a real browser."""

from __future__ import annotations

import json

import browser
import numpy as np
import pytest

import simattn
from simattn.device import DEVICES
from simattn.trace import (
    PLAYER_LIMIT,
    Trace,
    TraceTooLong,
    chrome,
    player,
    record,
)
from simattn.variants import VARIANTS

CHROMIUM = browser.find()


def inputs(n: int = 12, s: int = 10, d: int = 4, e: int = 3):
    rng = np.random.default_rng(5)
    return tuple(rng.standard_normal(shape).astype("f4") for shape in ((n, d), (s, d), (s, e)))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_recording_changes_nothing(variant: str, dtype: str) -> None:
    q, k, v = inputs()
    options = {"block_q": 5, "block_k": 4, "dtype": dtype, "is_causal": True}
    trace = record(variant, q, k, v, **options)
    run = simattn.attention(q, k, v, variant=variant, **options)
    assert trace.counts == trace.predicted == run.counts
    np.testing.assert_array_equal(trace.out, run.out.astype(trace.out.dtype))


@pytest.mark.parametrize("variant", VARIANTS)
def test_events_add_up_to_the_counts(variant: str) -> None:
    trace = record(variant, *inputs(), block_q=5, block_k=4, dtype="float16")
    counts, last = trace.counts, trace.events[-1]
    assert last.read_bytes == counts.traffic.total_read_bytes
    assert last.write_bytes == counts.traffic.total_write_bytes
    assert last.live_bytes == 0
    assert max(e.peak_bytes for e in trace.events) == counts.peak_sram_bytes
    for kind, total in (("load", last.read_bytes), ("store", last.write_bytes)):
        assert sum(e.hbm_bytes for e in trace.events if e.kind == kind) == total
    assert sum(e.matmul for e in trace.events) == counts.flops.matmul
    assert sum(e.nonmatmul for e in trace.events) == counts.flops.nonmatmul
    assert sum(e.exp for e in trace.events) == counts.flops.exp
    sram = counts.sram.read_bytes + counts.sram.write_bytes
    assert sum(e.sram_bytes for e in trace.events) == sram
    live: dict[int, int] = {}
    for event in trace.events:  # what came and went leaves what is said to be live
        live |= {number: size for number, _, size in event.added}
        for number in event.removed:
            del live[number]
        assert sum(live.values()) == event.live_bytes


def test_places_are_where_the_tiles_lie() -> None:
    trace = record("split_kv", *inputs(), block_q=5, block_k=4, splits=2)
    texts = [e.text for e in trace.events]
    assert "load K[8:10, 0:4]" in texts
    assert "store O_part[1:2, 10:12, 0:3]" in texts
    assert "load L_part[1:2, 5:10]" in texts
    scores = [e.at for e in trace.events if e.text.startswith("S = ")]
    assert scores[0] == ("S", ((0, 5), (0, 4)))
    assert scores[-1] == ("S", ((10, 12), (8, 10)))


def test_running_statistics_are_the_rows() -> None:
    """The last m and l noted for a row give its log-sum-exp."""
    q, k, v = inputs()
    lse = simattn.attention(q, k, v, return_lse=True).lse
    for variant in ("q_outer", "q_outer_each", "kv_outer", "kv_outer_end", "split_kv"):
        trace = record(variant, q, k, v, block_q=5, block_k=4)
        m, l = np.zeros(12), np.zeros(12)
        for event in trace.events:
            for noted, rows in ((event.m, m), (event.l, l)):
                if noted:
                    rows[noted[0] : noted[0] + len(noted[1])] = noted[1]
        np.testing.assert_allclose(m + np.log(l), lse, rtol=1e-5)


def test_chrome_json() -> None:
    traces = [record(name, *inputs(), block_q=5, block_k=4) for name in ("q_outer", "kv_outer")]
    data = json.loads(chrome(traces, DEVICES["classroom"]))
    events = data["traceEvents"]
    for pid, trace in enumerate(traces, 1):
        mine = [e for e in events if e["pid"] == pid]
        names = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
        assert names == {1: "HBM reads", 2: "HBM writes", 3: "compute"}
        spans = [e for e in mine if e["ph"] == "X"]
        assert all(e["dur"] >= 0 for e in spans)
        ends = 0.0
        for e in spans:  # one after another
            assert e["ts"] >= ends - 1e-9
            ends = e["ts"] + e["dur"]
        reads = sum(e["args"]["HBM bytes"] for e in spans if e["tid"] == 1)
        writes = sum(e["args"]["HBM bytes"] for e in spans if e["tid"] == 2)
        traffic = trace.counts.traffic
        assert (reads, writes) == (traffic.total_read_bytes, traffic.total_write_bytes)
        so_far = [e["args"] for e in mine if e["name"] == "HBM bytes so far"]
        assert so_far[-1] == {"read": reads, "written": writes}
        live = [e["args"]["bytes"] for e in mine if e["name"] == "SRAM bytes live"]
        assert max(live) == trace.counts.peak_sram_bytes
        assert live[-1] == 0


def test_a_trace_too_long_is_refused_before_and_while_it_runs() -> None:
    x = np.ones((64, 2), np.float32)
    with pytest.raises(TraceTooLong, match=r"more than 100 events.*--block-q"):
        record("q_outer", x, x, x, block_q=1, block_k=1, limit=100)
    with pytest.raises(TraceTooLong, match="more than 100 events"):
        record("q_outer", x, x, x, block_q=8, block_k=8, limit=100)


def test_capacity_is_enforced() -> None:
    with pytest.raises(simattn.SRAMCapacityError):
        record("q_outer", *inputs(), block_q=5, block_k=4, sram_bytes=64)


# The player


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    x = inputs(12, 12, 4, 4)
    return [record(name, *x, block_q=4, block_k=6, limit=PLAYER_LIMIT)
            for name in ("q_outer", "kv_outer")]  # fmt: skip


@pytest.fixture(scope="module")
def page(traces: list[Trace], tmp_path_factory: pytest.TempPathFactory):
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH (or in CHROMIUM): the player needs a real browser")
    file = tmp_path_factory.mktemp("player") / "player.html"
    file.write_text(player(traces), encoding="utf-8")
    with browser.page(CHROMIUM) as tab:
        tab.open(file.as_uri())
        yield tab


def shown(page, run: int, what: str) -> int:
    text = page.run(f"document.querySelector('#run{run} [data-of={what}]').textContent")
    return int(text.replace(",", ""))


def test_the_player_is_one_file(traces: list[Trace]) -> None:
    text = player(traces)
    assert "http:" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in text
    assert "src=" not in text
    assert '"DATA"' not in text


def test_it_loads_with_no_network_and_no_error(page) -> None:
    assert len(page.requests) == 1
    assert page.requests[0].startswith("file:///")
    assert page.problems == []
    assert page.run("step") == 0
    assert shown(page, 0, "total") == shown(page, 1, "total") == 0


def test_final_counters_are_the_runs(page, traces: list[Trace]) -> None:
    page.press("End")
    for i, trace in enumerate(traces):
        traffic = trace.counts.traffic
        assert shown(page, i, "reads") == traffic.total_read_bytes
        assert shown(page, i, "writes") == traffic.total_write_bytes
        assert shown(page, i, "total") == traffic.total_bytes
        assert shown(page, i, "peak") == trace.counts.peak_sram_bytes
        assert shown(page, i, "flops") == trace.counts.flops.matmul
        assert shown(page, i, "live") == 0


def test_every_step_shows_its_event(page, traces: list[Trace]) -> None:
    page.press("Home")
    for count in range(1, 40):
        page.press("ArrowRight")
        for i, trace in enumerate(traces):
            event = trace.events[count - 1]
            assert shown(page, i, "reads") == event.read_bytes
            assert shown(page, i, "live") == event.live_bytes
            assert page.run(f"document.querySelector('#run{i} .now').textContent") == event.text
    page.press("ArrowLeft")
    assert page.run("step") == 38


def test_keyboard_and_buttons(page, traces: list[Trace]) -> None:
    page.press("Home")
    assert page.run("step") == 0
    page.press("ArrowLeft")
    assert page.run("step") == 0
    longest = max(traces, key=lambda t: len(t.events)).events
    pairs = [i + 1 for i, e in enumerate(longest) if e.text.startswith("S = ")]
    page.press("ArrowRight", shift=True)
    page.press("ArrowRight", shift=True)
    assert page.run("step") == pairs[1]
    page.press("ArrowLeft", shift=True)
    assert page.run("step") == pairs[0]
    rate = page.run("document.getElementById('rate').textContent")
    for _ in range(8):
        page.press("+")
    assert page.run("document.getElementById('rate').textContent") == "128 a second" != rate
    page.press(" ")
    page.until(f"step === {len(longest)}")
    assert page.run("document.getElementById('play').textContent") == "Play"
    page.run("document.getElementById('first').click()")
    assert page.run("step") == 0
    page.run("document.getElementById('play').click()")
    page.until("step > 2")
    page.press(" ")
    stopped = page.run("step")
    assert page.run("timer") is None
    assert page.run("step") == stopped


def test_tiles_are_lit_and_sram_fills(page, traces: list[Trace]) -> None:
    loads = [i for i, e in enumerate(traces[0].events) if e.kind == "load"]
    page.run(f"go({loads[1] + 1})")
    assert page.run("document.querySelectorAll('#run0 svg .mark').length") == 1
    assert page.run("document.querySelector('#run0 svg .mark').textContent") == "R"
    tiles = page.run("document.querySelector('#run0 svg').lastElementChild"
                     ".querySelectorAll('rect').length")  # fmt: skip
    assert tiles == 5  # Q, m, l, O, K
    page.press("End")
    assert page.run("document.querySelector('#run0 svg').lastElementChild.children.length") == 0
