"""The commands figures, devices, floor, plot and trace, as a person types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from simattn import cli, figures, plot, trace
from simattn.cli import compare
from simattn.device import DEVICES, time_floor


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]):
    def run(*argv: str) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def refused(done: tuple[int, str, str], *naming: str) -> None:
    code, out, err = done
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for words in naming:
        assert words in err


# figures


def test_figures_as_json(call) -> None:
    code, out, err = call("figures", "--only", "fa1.table21", "--only", "ring", "--format", "json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert len(rows) == 18
    for row in rows:
        assert list(row) == ["id", "source", "printed", "ours", "ratio", "unit", "how"]
    assert rows == figures.table_21() + figures.ring_attention()


def test_figures_as_text_say_what_does_not_reproduce(call) -> None:
    code, out, _ = call("figures", "--only", "sawtooth", "--only", "saha-ye")
    assert code == 0
    assert "Does not reproduce:" in out
    assert "sawtooth.l2.causal: the printed form counts K and V only" in out
    assert "saha-ye.slope.below" in out
    assert "107,741,184" in out


def test_figures_count_the_rescales_of_a_file(call, tmp_path: Path) -> None:
    file = tmp_path / "qkv.npz"
    rng = np.random.default_rng(0)
    np.savez(file, **{name: rng.standard_normal((2, 70, 4)).astype("f4") for name in "qkv"})
    code, out, _ = call("figures", "--only", "fa4", "--input", file, "--format", "json")
    assert code == 0
    assert [row["id"] for row in json.loads(out)][-1] == "fa4.rescales.input.of-all"
    refused(call("figures", "--input", tmp_path / "none.npz"), "--input")


def test_figures_stop_and_resume(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> list[figures.Row]:
        raise KeyboardInterrupt

    file = tmp_path / "figures.jsonl"
    words = ("figures", "--only", "ring", "--only", "fa1.table21", "--format", "json")
    with monkeypatch.context() as patched:
        patched.setitem(figures.ITEMS, "fa1.table21", interrupt)
        code, out, err = call(*words, "--resume", file)
    assert code == 130
    assert json.loads(out) == figures.ring_attention()
    assert err == f"python -m simattn figures: stopped: 1 of 2 done; --resume {file} goes on\n"
    monkeypatch.setitem(figures.ITEMS, "ring", interrupt)  # is not asked again
    code, out, err = call(*words, "--resume", file)
    assert (code, err) == (0, "")
    assert len(json.loads(out)) == 18


# sweep


def test_sweep_stops_and_resumes(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sweep.jsonl"
    words = ("sweep", "--over", "n", "--values", "64,128,256", "--format", "json")
    whole = call(*words)[1]
    plain = compare.tiled_case
    asked: list[int] = []

    def stops(problem, variant, args):
        asked.append(problem.n)
        if problem.n == 128 and len(asked) < 12:
            raise KeyboardInterrupt
        return plain(problem, variant, args)

    monkeypatch.setattr(compare, "tiled_case", stops)
    code, out, err = call(*words, "--resume", file)
    assert code == 130
    assert {row["value"] for row in json.loads(out)} == {64}
    assert "stopped: 1 of 3 done" in err
    asked[:] = [0] * 20
    code, out, _ = call(*words, "--resume", file)
    assert (code, out) == (0, whole)
    assert 64 not in asked


def test_a_sweep_interrupted_by_a_signal_prints_what_it_has(tmp_path: Path) -> None:
    """A real Ctrl-C: exit code 130, rows on standard output, no traceback."""
    script = (
        "import os, signal, sys\n"
        "from simattn import cli, figures\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "figures.ITEMS['ring'] = lambda: os.kill(os.getpid(), signal.SIGINT) or []\n"
        "sys.exit(cli.main(['figures', '--only', 'fa1.table21', '--only', 'ring']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.returncode == 130
    assert "fa1.table21.flash.n65536" in done.stdout
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


# plan


def test_plan_for_a_device(call) -> None:
    code, out, _ = call("plan", "--device", "h100", "--n", "4096", "--dtype", "float16",
                        "--format", "json")  # fmt: skip
    assert code == 0
    by_bytes = call("plan", "--sram", str(227 * 1024), "--n", "4096", "--dtype", "float16",
                    "--format", "json")[1]  # fmt: skip
    assert out == by_bytes
    for row in json.loads(out):
        total = row["predicted_read_bytes"] + row["predicted_write_bytes"]
        assert row["total_vs_compulsory"] == total / (4 * 4096 * 64 * 2)
        M = 227 * 1024 / 2
        assert row["total_vs_n2d2_over_m"] == pytest.approx(total / 2 / (4096**2 * 64**2 / M))
    refused(call("plan", "--device", "v100"), "--device", "'v100'", "a100")
    refused(call("plan", "--device", "a100", "--sram", "1KiB"), "--sram", "--device")


# devices and floor


def test_devices(call, tmp_path: Path) -> None:
    code, out, _ = call("devices", "--format", "json")
    assert code == 0
    assert [row["device"] for row in json.loads(out)] == list(DEVICES)
    assert "whitepaper" in call("devices")[1]
    refused(call("devices", "--device", tmp_path / "none.toml"), "must be readable")


def test_floor(call) -> None:
    code, out, _ = call("floor", "--device", "a100", "--variant", "q_outer", "--n", "2048",
                        "--heads", "8", "--format", "json")  # fmt: skip
    assert code == 0
    (row,) = json.loads(out)
    f = time_floor(DEVICES["a100"], "q_outer", n=2048, d=64, heads=8, block_q=row["block_q"],
                   block_k=row["block_k"])  # fmt: skip
    assert row["floor_s"] == f.seconds
    assert row["binds"] == f.binds
    assert row["dram_bytes"] < row["l2_bytes"]
    text = call("floor", "--n", "2048")[1]
    assert all(name in text for name in DEVICES)
    refused(call("floor", "--device", "tpu"), "device 'tpu': must be one of")


def test_floor_where_nothing_fits(call) -> None:
    code, out, err = call("floor", "--device", "classroom", "--variant", "q_outer", "--d", "4096")
    assert code == 2
    assert "no variant has tiles that fit" in err
    assert "q_outer" in out


# plot


@pytest.mark.parametrize("kind", ["tile-size", "occupancy"])
def test_plot_writes_a_picture(call, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib", reason="the pictures need the extra 'plot'")
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        path = tmp_path / f"picture{suffix}"
        code, out, err = call("plot", kind, "--out", path)
        assert (code, err) == (0, "")
        assert str(path) in out
        assert path.read_bytes().startswith(magic)


def test_plot_sweep_stops_and_resumes(call, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("matplotlib", reason="the pictures need the extra 'plot'")
    path, file = tmp_path / "picture.png", tmp_path / "sweep.jsonl"
    words = ("plot", "traffic-sram", "--n", "512", "--out", path, "--resume", file)
    plain, asked = plot.rule_bytes, []

    def stops(*args, **shape):
        asked.append(args)
        if len(asked) == 9:
            raise KeyboardInterrupt
        return plain(*args, **shape)

    monkeypatch.setattr(plot, "rule_bytes", stops)
    code, _, err = call(*words)
    assert code == 130
    assert "stopped: 4 of 219 done" in err
    assert path.exists()  # what was done is drawn
    code, _, err = call(*words)
    assert (code, err) == (0, "")
    assert len(asked) == 9 + 2 * 215


def test_plot_says_where_the_loop_orders_cross(call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the pictures need the extra 'plot'")
    _, out, _ = call("plot", "traffic-sram", "--out", tmp_path / "x.svg")
    assert "paper: kv_outer moves less from 55,108 bytes (not yet at 52,016)" in out
    assert "seed: no crossing from 8,192 to 524,288 bytes" in out
    assert "best: no crossing from 8,192 to 524,288 bytes" in out


def test_plot_wrong_input(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "x.png"
    refused(call("plot", "pie", "--out", out), "'pie'")
    refused(call("plot", "tile-size"), "--out")
    refused(call("plot", "tile-size", "--out", tmp_path / "x.gif"), "--out", ".png, .svg, .pdf")
    refused(call("plot", "tile-size", "--out", tmp_path / "no" / "x.png"), "--out", "be writable")
    refused(call("plot", "roofline", "--device", "v100", "--out", out), "device 'v100'")
    pytest.importorskip("matplotlib", reason="the pictures need the extra 'plot'")
    refused(call("plot", "heatmap", "--sram", "64", "--out", out), "--sram 64", "at least")
    refused(call("plot", "occupancy", "--sram", "64", "--out", out), "--sram 64", "at least")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(call("plot", "tile-size", "--out", out), "matplotlib", "simattn[plot]")
    assert not out.exists()


# trace


def test_trace_writes_both_files(call, tmp_path: Path) -> None:
    page, events = tmp_path / "p.html", tmp_path / "t.json"
    code, out, err = call("trace", "--player", page, "--chrome", events, "--format", "json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert [row["variant"] for row in rows] == ["q_outer", "kv_outer"]
    assert all(row["as_predicted"] for row in rows)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(events.read_text())["traceEvents"]


def test_trace_wrong_input(call, tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    refused(call("trace"), "--chrome FILE.json", "--player FILE.html")
    refused(call("trace", "--player", tmp_path), "--player", "must be writable")
    refused(call("trace", "--chrome", tmp_path / "no" / "t.json"), "--chrome", "must be writable")
    refused(call("trace", "--player", page, "--n", "100000"), "more than 20000 events", "--block-q")
    refused(call("trace", "--player", page, "--n", "200"), "more than 20000 events", "--n")
    refused(call("trace", "--player", page, "--sram", "64"), "--sram 64", "at least 624 bytes")
    refused(call("trace", "--player", page, "--device", "v100"), "device 'v100'")
    assert not page.exists()
    assert trace.PLAYER_LIMIT == 20_000


def test_files_and_budgets_that_cannot_be(call, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    refused(call("trace", "--player", path, "--chrome", path), "must not be the file of --chrome")
    refused(call("plot", "traffic-n", "--sram", "10", "--out", f"{path}.png"), "no variant has")
    refused(call("plot", "roofline", "--device", "classroom", "--out", f"{path}.png"), "no variant")
    assert not list(tmp_path.iterdir())
