"""Run the simulator's tests, the doctests and the example in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import kernels_gpu
import pytest

ROOT = Path(__file__).parent.parent
needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="needs numba-cuda (extra: test)"
)


def run_simulated(*argv: str, simulator: str = "1") -> subprocess.CompletedProcess[str]:
    """Python with Numba's CUDA simulator, whatever this process has imported."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": simulator, "PYTHONPATH": path},
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
    modules = ("_cuda", "counters", "cache", "layout", "problem", "tensors", "traffic")
    done = run_simulated(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules",
        *(f"kernels/{module}.py" for module in modules),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"{len(modules) + 1} passed" in done.stdout  # layout has two


@needs_numba
def test_example_without_a_gpu_says_so_in_one_line() -> None:
    if kernels_gpu.device_count():
        pytest.skip("there is a GPU")
    done = run_simulated("examples/launch_kernel.py", simulator="0")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "no CUDA GPU was found" in done.stderr


@needs_numba
@pytest.mark.parametrize("command", ["bench", "check", "counters"])
def test_what_needs_a_gpu_refuses_the_simulator_in_one_line(command) -> None:
    done = run_simulated("-m", "kernels", command)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "NUMBA_ENABLE_CUDASIM=1 chose the simulator" in done.stderr


@needs_numba
def test_example_runs_and_predicts() -> None:
    done = run_simulated("examples/launch_kernel.py")
    assert done.returncode == 0, done.stderr
    assert "q_outer: largest error 2e-07" in done.stdout
    # 20 queries and keys of width 8, tiles of 8: Q and O once, K and V three times
    assert "predicted 1120 elements read, 160 written, 5120 bytes in all" in done.stdout
