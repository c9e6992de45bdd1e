"""Stored measurements and Nsight Compute's output: read, compared, printed. Needs no GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

import simattn
from kernels import check, cli, counters, results
from kernels.check import Case
from kernels.problem import VARIANTS, numpy_dtype
from simattn import exact

REPORT = {
    "command": "python -m kernels bench",
    "card": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "numba": "0.68.0",
    "rows": [
        {
            "n": 1024, "d": 64, "batch": 16, "heads": 32, "is_causal": False, "flops": 2e12,
            "q_outer": {"seconds": 0.1, "predicted_bytes": 100},
            "kv_outer": {"seconds": 0.4, "predicted_bytes": 150},
            "torch": {"efficient_attention": 0.05},
        }
    ],
}  # fmt: skip
COUNTED = {
    "command": "python -m kernels counters",
    "card": "NVIDIA H200",
    "counters": [{"case": "one", "measured": [1024, 64], "predicted": [1024, 64]}],
}


def test_bench_table() -> None:
    lines = results.bench_table(REPORT).splitlines()
    assert lines[0] == (
        "`python -m kernels bench`: NVIDIA H200, driver 580.1, cuda 13.0, numba 0.68.0. "
        "TFLOP/s."
    )  # fmt: skip
    assert lines[2].endswith("| torch efficient | time, kv / q | traffic, kv / q |")
    assert lines[-1] == "| 64 | 1024 | 16 x 32 | 20.0 | 5.0 | 40.0 | 4.00 | 1.50 |"


def test_results_prints_files(tmp_path, capsys) -> None:
    for name, report in (("a", REPORT), ("b", COUNTED)):
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    assert cli.main(["results", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "| one | 1,024 | 1,024 | 64 | 64 |" in capsys.readouterr().out


def test_stored_results_can_be_printed() -> None:
    for path in results.FOLDER.glob("*.json"):
        assert results.main([path]) == 0


STORED = [json.loads(path.read_text()) for path in sorted(results.FOLDER.glob("*.json"))]


def test_stored_counters_are_what_the_closed_form_says_today() -> None:
    cases = {str(case): case for case in counters.CASES}
    rows = [row for report in STORED for row in report.get("counters", ())]
    assert len(rows) >= len(counters.CASES)
    for row in rows:
        model = counters.predicted(cases[row["case"]], row["block_q"], row["block_k"])
        assert tuple(row["measured"]) == tuple(row["predicted"]) == model


def test_stored_times_stand_beside_the_traffic_predicted_today() -> None:
    rows = [row for report in STORED for row in report.get("rows", ()) if "q_outer" in row]
    assert rows
    for row in rows:
        problem = {name: row[name] for name in ("n", "d", "batch", "heads", "is_causal")}
        for variant in VARIANTS:
            tiles = {name: min(row["n"], row[variant][name]) for name in ("block_q", "block_k")}
            traffic = simattn.predict(variant, **problem, **tiles).traffic
            assert row[variant]["predicted_bytes"] == traffic.total_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "[1]",
        "3",
        "null",
        '{"rows": [{"n": 1}]}',
        '{"rows": 3}',
        '{"counters": [[]]}',
        "{}",
    ],
)
def test_what_is_no_report_is_refused_in_one_line(text, tmp_path, capsys) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    assert cli.main(["results", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert f"{path}: is no report of bench, peers or counters" in printed.err


def test_bfloat16_without_ml_dtypes_is_said_in_one_line(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match="dtype: bfloat16 needs ml_dtypes"):
        numpy_dtype("dtype", "bfloat16")


@pytest.fixture
def gpu_assumed(monkeypatch) -> None:
    pytest.importorskip("numba_cuda")
    monkeypatch.setattr("kernels.driver.need_gpu", lambda: None)


def test_counters_compare_measured_with_predicted_bytes(
    gpu_assumed, monkeypatch, capsys, tmp_path
) -> None:
    def output(spoil: int) -> str:
        rows = [
            f'"{i}","flash_kernel","{read:,}","{read // 32}","{write + spoil}","0"'
            for i, (read, write) in enumerate(
                counters.predicted(case, *counters.tiles_of(case)) for case in counters.CASES
            )
        ]
        names = '","'.join(counters.METRICS)
        head = f'"ID","Kernel Name","{names}"\n"","","byte","sector","byte","byte"\n'
        return "==PROF== Connected\n" + head + "\n".join(rows) + "\n"

    monkeypatch.setattr("kernels.bench.environment", lambda: {"card": "none"})
    tiles_of = lambda case: (case.block_q or 128, case.block_k or 64)  # noqa: E731
    monkeypatch.setattr(counters, "tiles_of", tiles_of)
    for spoil, code in ((0, 0), (4, 1)):
        monkeypatch.setattr(counters, "run_ncu", lambda ncu, spoil=spoil: output(spoil))
        path = tmp_path / f"{spoil}.json"
        assert cli.main(["counters", "--json", str(path)]) == code
        assert len(json.loads(path.read_text())["counters"]) == len(counters.CASES)
        text = capsys.readouterr().out
        assert text.count("DIFFERENT") == (0 if code == 0 else len(counters.CASES))


def test_counters_without_nsight_compute(gpu_assumed, capsys) -> None:
    assert cli.main(["counters", "--ncu", "/nowhere/ncu"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "'/nowhere/ncu' was not found" in error


def test_predicted_bytes_by_hand() -> None:
    """4 heads of 1000 rows, width 64, 16 row tiles: Q once, K and V 16 times; O and L written."""
    case = Case("q_outer", 1000, 64, heads=4, kv_heads=4, block_q=64, block_k=64)
    read = 4 * 4 * (1000 * 64 + 16 * 1000 * 2 * 64)
    assert counters.predicted(case, 64, 64) == (read, 4 * 4 * (1000 * 64 + 1000))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["traffic", "--n", "0"], "--n: '0' must be a whole number >= 1"),
        (["traffic", "--n", "1e3"], "--n: '1e3' must be a whole number >= 1"),
        (["traffic", "--block-q=-4"], "--block-q: '-4' must be a whole number >= 1"),
        (["traffic", "--window", "3"], "--window: '3' must be two whole numbers, L,R"),
        (["traffic", "--seed=-1"], "--seed: '-1' must be a whole number >= 0"),
        (["traffic", "--seed", "9" * 5000], "--seed: '999"),
        (["traffic", "--n", "9" * 5000], "--n: '999"),
        (["traffic", "--n", "9" * 19], "must be a whole number >= 1 and <= 281474976710656"),
        (["traffic", "--window", "9" * 5000 + ",0"], "--window: '999"),
        (["bench", "--d", "9" * 5000], "--d: '999"),
        (["traffic", "--variant", "two_pass"], "--variant: invalid choice: 'two_pass'"),
        (["traffic", "--dtype", "float64"], "--dtype: invalid choice: 'float64'"),
        (["bench", "--n", "64,x"], "--n: 'x' must be a whole number >= 1"),
        (["fly"], "invalid choice: 'fly'"),
    ],
)
def test_wrong_arguments_get_one_line(argv, message, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert len(printed.err) < 250


@pytest.mark.parametrize("case", list(check.cases()), ids=str)
def test_what_check_allows_is_small(case: check.Case) -> None:
    """Rounding and no more: a wrong mask in plain attention would allow anything."""
    q, k, v = check.inputs(case)
    mask = {"is_causal": case.is_causal, "window_size": case.window_size}
    exactly = exact.attention(*(np.asarray(x, np.float64) for x in (q, k, v)), **mask)
    outcome = check.compare(case, (q, k, v), *exactly, 64)
    assert (outcome.out_error, outcome.lse_error) == (0, 0)
    stores = 1 if case.variant == "q_outer" else 1 + -(-k.shape[-2] // 64)
    assert outcome.out_allowed < 2e-5 + 4 * stores * check.EPS[case.dtype]
    assert outcome.lse_allowed < 2e-5


def test_options_that_would_do_nothing_are_refused(capsys) -> None:
    for argv, message in (
        ("check --variant mma", "--variant: mma needs --cores"),
        ("check --small --dtype float16,float32", "--dtype: float16,float32 needs --cores"),
    ):
        assert cli.main(argv.split()) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert message in printed.err


def test_what_sm90_cannot_have_is_refused_before_anything_is_compiled(monkeypatch) -> None:
    from kernels import check_cores, tune

    monkeypatch.setattr(check_cores, "taken", lambda case: case.variant == "mma")
    with pytest.raises(ValueError, match="--dtype: sm90 in float32 is not for this device"):
        check_cores.main(["sm90"], ["float32"])
    with pytest.raises(ValueError, match="--dtype: float32 is not for sm90"):
        tune.main(variant="sm90", widths=(64,), rows=(1024,), dtypes=("float16", "float32"))


def test_peers_without_a_shape_say_so() -> None:
    from kernels import peers

    with pytest.raises(ValueError, match=r"--d 77: must be of a shape .*: d 64, 96, 128, 256; n"):
        peers.main(widths=(77,))


def test_the_rows_of_a_table_follow_from_speeds() -> None:
    """Those of d 64 from what an H200 gave once."""
    from kernels import mma_layout, sm90_layout, tune

    long, short = (sm90_layout.Sm90Layout(64, 64, **row[-1]) for row in sm90_layout.LAYOUTS[:2])
    shallow = replace(long, stages=2, sits_out=False)
    found = {
        False: {512: (438, 432, 424), 1024: (502, 491, 489), 2048: (576, 497, 568),
                4096: (567, 507, 589)},
        True: {512: (248, 278, 245), 1024: (330, 378, 327), 2048: (464, 451, 457),
               4096: (516, 468, 518)},
    }  # fmt: skip
    speeds = {
        (is_causal, n): dict(zip((long, short, shallow), map(float, took), strict=True))
        for is_causal, rows in found.items()
        for n, took in rows.items()
    }
    assert tuple(tune.table(64, speeds)) == sm90_layout.LAYOUTS[:2]
    alike = {key: {long: 101.0, short: 100.5} for key in speeds}
    alike[True, 512] = {long: 100.0, short: 102.0}  # two rows would gain a quarter of a percent
    assert tune.table(64, alike) == [(64, 64, 0, 0, tune.options(long))]
    alone = {key: {short: 1.0} for key in speeds}
    assert tune.table(64, alone) == [(64, 64, 0, 0, tune.options(short))]
    assert tune.table(64, {(False, 512): {}}) == []
    layout, other = (mma_layout.layout_for(d, d) for d in (256, 192))
    took = {(False, 1024): {other: 1.0, layout: 3.0}, (True, 1024): {other: 2.0, layout: 1.0}}
    assert tune.table(256, took) == [mma_layout.LAYOUTS[2, True][-1]]
    layout = mma_layout.layout_for(64, 64, itemsize=4)
    took = {(False, 1024): {layout: 1.0, replace(layout, chain=4): 2.0}}  # not in the table
    assert tune.table(64, took) == [mma_layout.LAYOUTS[4, True][0]]


def test_every_layout_of_a_hopper_gpus_tables_is_timed() -> None:
    from kernels import mma_layout, sm90_layout, tune

    for dtype, itemsize in (("float16", 2), ("float32", 4)):
        for d, e, _ in mma_layout.LAYOUTS[itemsize, True]:
            layout = mma_layout.layout_for(d, d, itemsize=itemsize)
            assert d != e or layout in tune.candidates("mma", d, dtype)
    for d, e, *_, options in sm90_layout.LAYOUTS:
        layout = sm90_layout.Sm90Layout(d, d, **options)
        assert d != e or layout in tune.candidates("sm90", d, "float16")
