"""The Hopper kernel compiled for sm_90a, without a GPU: its registers, its products."""

from __future__ import annotations

import subprocess

import pytest
import toolkit

pytest.importorskip("numba_cuda", reason="kernels are written against numba.cuda")

from kernels import ptxas
from kernels._cuda import SIMULATOR, cuda
from kernels.flash_sm90 import flash_sm90, signature
from kernels.sm90_layout import LAYOUTS, Sm90Layout

if SIMULATOR or not toolkit.is_here() or ptxas.find_ptxas() is None:
    pytest.skip("needs the CUDA compiler and ptxas (extra: cu13)", allow_module_level=True)

WORDS = (
    "wgmma.mma_async", "wgmma.wait_group", "cp.async.bulk.tensor.4d.shared::cluster",
    "cp.async.bulk.tensor.4d.global", "cp.async.bulk.prefetch.tensor.4d", "stmatrix.sync",
    "mbarrier.try_wait", "mma.sync.aligned.m16n8k16",
)  # fmt: skip
SHAPES = [
    pytest.param(
        Sm90Layout(d, e, **options, maxima=maxima), dtype, id=f"{d}-{e}-{i}-{maxima}-{dtype}",
        marks=[] if (i, maxima, dtype) == (2, "fast", "float16") else [pytest.mark.slow],
    )
    for i, (d, e, _, options) in enumerate(LAYOUTS)
    for maxima in ("fast", "exact")
    for dtype in ("float16", "bfloat16")
]  # fmt: skip


@pytest.mark.parametrize(("layout", "dtype"), SHAPES)
def test_registers_are_those_declared_and_nothing_is_serialised(layout, dtype, tmp_path):
    text, _ = cuda.compile(
        flash_sm90(layout, dtype), signature(), device=False, abi="numba", cc=(9, 0, "a"),
        output="ptx", launch_bounds=(layout.threads, layout.min_blocks),
    )  # fmt: skip
    for word in WORDS:
        assert word in text or (word.startswith("mma") and layout.maxima == "exact"), word
    assert f"setmaxnreg.dec.sync.aligned.u32 {layout.producer_registers}" in text
    assert f"setmaxnreg.inc.sync.aligned.u32 {layout.consumer_registers}" in text
    source = tmp_path / "kernel.ptx"
    source.write_text(text)
    done = subprocess.run(
        [ptxas.find_ptxas(), "-arch=sm_90a", "-v", source, "-o", tmp_path / "kernel.cubin"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"Used {layout.launch_registers} registers" in done.stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in done.stderr
    assert "Potential Performance Loss" not in done.stderr  # products one by one: C7510 and others
