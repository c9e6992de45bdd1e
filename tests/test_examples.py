"""Every example runs, prints what it promises, twice the same, and is one page."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NAMES = sorted(p.stem for p in EXAMPLES.glob("*.py") if p.stem != "launch_kernel")
SIDE_BY_SIDE = [name for name in NAMES if name.startswith("seed_") and name != "seed_rows"]
LONGER: set[str] = set()  # examples allowed more than a page


def run(name: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


output = functools.cache(run)


def rows(text: str, start: str) -> list[str]:
    """The lines that start with these words, without them, all blanks made one."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return [line.removeprefix(f"{start} ") for line in lines if line.startswith(f"{start} ")]


def row(text: str, start: str) -> str:
    """The one line that starts with these words, without them."""
    (found,) = rows(text, start)
    return found


def test_all_examples_are_here() -> None:
    assert {"loop_orders", "online_softmax", "real_input", "seed_rows", "tile_sizes"} <= set(NAMES)
    assert len(SIDE_BY_SIDE) == 4


@pytest.mark.parametrize("name", NAMES)
def test_runs_and_prints_aligned_short_lines(name: str) -> None:
    lines = output(name).splitlines()
    assert len(lines) >= 4
    assert not [line for line in lines if len(line) > 100 or line != line.rstrip()]


@pytest.mark.parametrize("name", NAMES)
def test_is_one_page_with_a_main(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    assert "def main() -> None:" in source
    assert f"python examples/{name}.py" in source  # how to run it
    assert name in LONGER or len(source.splitlines()) < 80
    assert f"`{name}.py`" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("name", ["loop_orders", "real_input", "seed_tiled"])
def test_output_is_the_same_every_time(name: str) -> None:
    assert run(name) == output(name)


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_the_words_beside_a_tutorial_are_ours(name: str) -> None:
    core = "".join(p.read_text() for p in (ROOT / "simattn").glob("*.py"))
    source = (EXAMPLES / f"{name}.py").read_text()
    beside = "\n".join(re.findall(r"# (.*)", source.split("# fmt: off")[1].split("# fmt: on")[0]))
    called = set(re.findall(r"(\w+)\(", beside))
    assert len(called) >= 5
    assert not [word for word in called if not re.search(rf"\b{word}\(", core)]


def test_loop_orders_reverse() -> None:
    text = output("loop_orders")
    # one unit: tutorial, counted, form; all units: the same.  N = 64, d = 32
    assert row(text, "untiled q_outer") == "4160 4160 4160 266240 266240 266240"
    assert row(text, "untiled kv_outer") == "2240 6464 6464 143360 415872 415872"
    assert row(text, "16 x 16 q_outer") == "5120 5120 5120 20480 20480 20480"
    assert row(text, "16 x 16 kv_outer") == "3200 7424 7424 12800 31872 31872"
    assert rows(text, "less moved") == ["kv_outer q_outer kv_outer q_outer"] * 2
    assert row(text, "O") == "2048 2048 -"  # what the tutorial leaves out
    assert row(text, "m l") == "128 128 2N read"


def test_online_softmax_by_hand() -> None:
    text = output("online_softmax")
    assert row(text, "3 ln 2") == "(4, 8) 1 0.5 ln 4 1.75 5.5 11"
    assert row(text, "4 ln 8") == "(1, 2) 0.5 1 ln 8 1.875 3.75 7.5"
    assert "merged: ln 8   1.875     3.75    7.5" in text
    assert "equal to 1e-14" in text


def test_tile_sizes_where_the_orders_cross() -> None:
    text = output("tile_sizes")
    assert "q_outer moves less up to 6.19 d^2" in text
    assert "fit only beyond 8.32 d^2" in text
    assert row(text, "8 = 128 KiB") == "tutorial 128 64 8.09 no 17.30 52.17"
    paper = [line.split() for line in rows(text, "paper")]
    assert [cells[3] for cells in paper] == ["no", "no", "no", "yes", "yes"]
    assert [float(cells[4]) < float(cells[5]) for cells in paper] == [True, True] + [False] * 3
    best_q, best_kv = (
        [line.split() for line in rows(text, f"best {order}")] for order in ("q_outer", "kv_outer")
    )
    assert len(best_q) == len(best_kv) == 5
    for q, kv in zip(best_q, best_kv, strict=True):
        assert q[3] == kv[3] == "yes"
        assert float(q[4]) < float(kv[5])


def test_seed_rows_are_all_there_and_right() -> None:
    text = output("seed_rows")
    table = [line for line in text.splitlines() if re.match(r" *\d+  ", line)]
    assert {int(line.split()[0]) for line in table} == set(range(1, 13))
    for line in table:
        error, same, reads, writes = line.split()[-4:]
        assert float(error) < 1e-6
        assert same == "yes"
        assert int(reads) > 0
        assert int(writes) > 0
    assert "q_outer_each: counted 816; the tutorial's 2Nd + 2d = 816" in text
    assert "kv_outer: counted 1416, and 500 once" in text
    assert "2d + Nd + 2N = 516" in text


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("seed_untiled", ["flashattn_naiveQKV", "flashattn_naiveKVQ, o0[k]"],
         ["flashattn_naiveKVQ, printed"]),
        ("seed_tiled", ["flashattnV1_block", "flashattnV2_blockKVQ"],
         ["  with l as in the formula", "  with O as in the formula"]),
    ],
)  # fmt: skip
def test_printed_forms_fail_and_right_forms_match(
    name: str, right: list[str], wrong: list[str]
) -> None:
    lines = output(name).splitlines()
    for starts, verdict in ((right, "matches"), (wrong, "FAILS")):
        for start in starts:
            (line,) = [text for text in lines if text.startswith(start)]
            assert verdict in line
    ours = re.findall(r"ours, \w+[:,] differs by ([\d.e+-]+)", output(name))
    assert len(ours) == 2
    assert all(float(error) < 1e-14 for error in ours)


def test_softmaxes_and_the_formula_box() -> None:
    text = output("seed_softmax")
    for tutorial, ours, accesses in (("softmax_3_pass", "safe", "4"),
                                     ("online_softmax_2_pass", "online", "3")):  # fmt: skip
        error, *_, name, our_error, each = row(text, tutorial).split()
        assert float(error) < 1e-15
        assert float(our_error) < 1e-15
        assert (name, each) == (ours, accesses)
    assert float(row(text, "formula_box").split()[0]) > 0.1


def test_floor_division_loses_rows() -> None:
    text = output("seed_chunked")
    verdicts = {}
    for n, s in ((12, 12), (13, 12), (12, 13), (13, 13), (9, 12)):
        printed_rows, _, printed, our_rows, _, ours, *_ = row(text, f"{n} {s}").split()
        assert (int(our_rows), ours) == (n, "matches")
        verdicts[n, s] = int(printed_rows), printed
    assert verdicts[12, 12] == (12, "matches")
    assert verdicts[13, 12] == verdicts[12, 13] == verdicts[13, 13] == (12, "FAILS")
    assert verdicts[9, 12] == (8, "FAILS")


def test_real_input_overflows_without_the_maximum() -> None:
    text = output("real_input")
    scaled = row(text, "S / sqrt(32) -70 .. 81 float16")
    assert scaled == "684 856 inf 6.6e+04"
    scaled = row(text, "S / sqrt(32) -70 .. 81 float32")
    assert scaled == "0 0 2.4e+35 3.4e+38"
    assert row(text, "S, not scaled -396 .. 461 float32") == "511 511 inf 3.4e+38"
    assert "FAILS" not in text
    assert " NO " not in text
    traffic = [line.split()[3:] for line in rows(text, "q_outer")]
    assert traffic == [["6.38", "0.38", "36.8"], ["12.75", "0.75", "48.8"]]
    assert len(re.findall(r"^\w+ +yes +[\d.e-]+ ", text, flags=re.MULTILINE)) == 18
