"""Run the simulator's tests, the doctests and the example in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="needs numba-cuda (extra: test)"
)


def run_simulated(*argv: str) -> subprocess.CompletedProcess[str]:
    """Python with Numba's CUDA simulator, whatever this process has imported."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )


@needs_numba
def test_kernels_under_the_simulator() -> None:
    done = run_simulated(
        "-m", "pytest", "-q", "-m", "cudasim", "-p", "no:cacheprovider",
        "tests/test_kernels_simulated.py",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@needs_numba
def test_doctests() -> None:
    modules = ("_cuda", "counters", "launch", "layout", "problem", "tensors", "traffic")
    done = run_simulated(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules",
        *(f"kernels/{module}.py" for module in modules),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"{len(modules)} passed" in done.stdout


@needs_numba
def test_example_runs_and_predicts() -> None:
    done = run_simulated("examples/launch_kernel.py")
    assert done.returncode == 0, done.stderr
    assert "q_outer: largest error 2e-07" in done.stdout
    # 20 queries and keys of width 8, tiles of 8: Q and O once, K and V three times
    assert "predicted 1120 elements read, 160 written, 5120 bytes in all" in done.stdout
