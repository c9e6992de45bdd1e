"""Stored measurements and Nsight Compute's output: read, compared, printed. Needs no GPU."""

from __future__ import annotations

import json

import pytest

from kernels import cli, counters, results
from kernels.check import Case

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
        "`python -m kernels bench`: NVIDIA H200, driver 580.1, cuda 13.0, numba 0.68.0."
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


def test_counters_compare_measured_with_predicted_bytes(monkeypatch, capsys, tmp_path) -> None:
    def output(spoil: int) -> str:
        rows = [
            f'"{i}","void flash_kernel(float *)","{read:,}","{write + spoil}"'
            for i, (read, write) in enumerate(map(counters.predicted, counters.CASES))
        ]
        head = f'"ID","Kernel Name","{counters.READ}","{counters.WRITE}"\n"","","byte","byte"\n'
        return "==PROF== Connected\n" + head + "\n".join(rows) + "\n"

    monkeypatch.setattr("kernels.bench.environment", lambda: {"card": "none"})
    for spoil, code in ((0, 0), (4, 1)):
        monkeypatch.setattr(counters, "run_ncu", lambda ncu, spoil=spoil: output(spoil))
        path = tmp_path / f"{spoil}.json"
        assert cli.main(["counters", "--json", str(path)]) == code
        assert len(json.loads(path.read_text())["counters"]) == len(counters.CASES)
        text = capsys.readouterr().out
        assert text.count("DIFFERENT") == (0 if code == 0 else len(counters.CASES))


def test_counters_without_nsight_compute(capsys) -> None:
    assert cli.main(["counters", "--ncu", "/nowhere/ncu"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "'/nowhere/ncu' was not found" in error


def test_predicted_bytes_by_hand() -> None:
    """4 heads of 1000 rows, width 64, 16 row tiles: Q once, K and V 16 times; O and L written."""
    case = Case("q_outer", 1000, 64, heads=4, kv_heads=4, block_q=64, block_k=64)
    read = 4 * 4 * (1000 * 64 + 16 * 1000 * 2 * 64)
    assert counters.predicted(case) == (read, 4 * 4 * (1000 * 64 + 1000))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["traffic", "--n", "0"], "--n: '0' must be a whole number >= 1"),
        (["traffic", "--n", "1e3"], "--n: '1e3' must be a whole number >= 1"),
        (["traffic", "--block-q=-4"], "--block-q: '-4' must be a whole number >= 1"),
        (["traffic", "--window", "3"], "--window: '3' must be two whole numbers, L,R"),
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
