"""The README: every console block prints what it shows, every Python block is a doctest."""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from simattn.cli.rows import UNTILED_PAIRS
from simattn.device import DEVICES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def console_commands() -> list[tuple[str, str]]:
    """(command, what it prints) of each console block."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def without_rounding_errors(text: str) -> str:
    """Numbers like 3.71e-07 depend on the machine's matrix product; all others do not."""
    return re.sub(r" *\d(\.\d+)?e-\d\d", " ~", text).rstrip()


@pytest.mark.parametrize(("command", "output"), console_commands(), ids=lambda x: x[:60])
def test_console_block(command: str, output: str) -> None:
    program, *arguments = shlex.split(command)
    assert program == "python"
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert without_rounding_errors(ran.stdout) == without_rounding_errors(output)


def test_python_blocks() -> None:
    blocks = re.findall(r"```python\n(>>>.*?)```", README, flags=re.DOTALL)
    assert blocks
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "README.md", "README.md", 0)
    assert doctest.DocTestRunner().run(test).failed == 0


def test_the_first_two_set_up_lines_install_and_run() -> None:
    lines = [line for line in README.splitlines() if " && " in line]
    parts = [re.match(r"pip install (\S+) && python -m (\S+)", line).groups() for line in lines[:2]]
    assert parts == [(".", "simattn"), ("'.[test]'", "pytest")]


def test_the_loop_nest_shown_is_the_one_that_runs() -> None:
    shown = re.search(r"```python\n(for i in grid.*?)```", README, flags=re.DOTALL).group(1)
    source = (ROOT / "simattn" / "variants.py").read_text(encoding="utf-8")
    assert "".join(f"    {line}\n" for line in shown.splitlines()) in source


def test_stored_gpu_results_are_shown_whole() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kernels", "results"], cwd=ROOT, capture_output=True, text=True,
        check=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    shown = ran.stdout.strip()
    assert README.count(shown) == 1
    rest = README.replace(shown, "")
    assert "Geometric mean" not in rest  # of an earlier run
    assert "| float16 |" not in rest


def test_numbers_in_the_prose_are_those_of_the_tables() -> None:
    report = json.loads((ROOT / "kernels" / "results" / "h200_bench.json").read_text())
    slower = [row["kv_outer"]["seconds"] / row["q_outer"]["seconds"] for row in report["rows"]]
    moved = [
        row["kv_outer"]["predicted_bytes"] / row["q_outer"]["predicted_bytes"]
        for row in report["rows"]
    ]
    said = re.search(r"moves (\S+) times the bytes, and takes (\S+) to (\d+) times", README)
    assert said.groups() == (f"{max(moved):.1f}", f"{min(slower):.1f}", f"{max(slower):.0f}")
    report = json.loads((ROOT / "kernels" / "results" / "h200_against_torch.json").read_text())
    took = [
        row["seconds"] for row in report["peers"]
        if (row["dtype"], row["group"]) == ("float16", 1) and row["d"] in (64, 128)
    ]  # fmt: skip
    assert len(took) == 12
    means = [statistics.geometric_mean(x[y] / x["ours"] for x in took) for y in ("cudnn", "flash")]
    faster = re.search(r"run (\S+) times as fast\nas cuDNN's attention and (\S+) times", README)
    assert faster.groups() == tuple(f"{mean:.2f}" for mean in means)
    assert f"({DEVICES['h100'].l2_bytes // 2**20} MB on an H100)" in README
    assert f"2^{UNTILED_PAIRS.bit_length() - 1} such pairs" in README.replace("\n  ", " ")


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
