"""The Hopper kernel compiled for sm_90a, without a GPU: its registers, its products."""

from __future__ import annotations

import subprocess

import pytest
import toolkit

pytest.importorskip("numba_cuda", reason="kernels are written against numba.cuda")

from kernels import ptxas
from kernels._cuda import SIMULATOR
from kernels.compiled import Kernel, ptx
from kernels.sm90_layout import EXACT, LAYOUTS, Sm90Layout

if SIMULATOR or not toolkit.is_here() or ptxas.find_ptxas() is None:
    pytest.skip("needs the CUDA compiler and ptxas (extra: cu13)", allow_module_level=True)

WORDS = (
    "wgmma.mma_async", "wgmma.wait_group", "cp.async.bulk.tensor.4d.shared::cluster",
    "cp.async.bulk.tensor.4d.global", "cp.async.bulk.prefetch.tensor.4d", "stmatrix.sync",
    "mbarrier.try_wait", "mma.sync.aligned.m16n8k16",
)  # fmt: skip
SHAPES = [
    pytest.param(
        Sm90Layout(d, e, **options | (EXACT.get((d, e), {}) if maxima == "exact" else {}),
                   maxima=maxima),
        dtype, id=f"{d}-{e}-{i}-{maxima}-{dtype}",
        marks=[] if (i, maxima, dtype) == (2, "fast", "float16") else [pytest.mark.slow],
    )
    for i, (d, e, _, _, options) in enumerate(LAYOUTS)
    for maxima in ("fast", "exact")
    for dtype in ("float16", "bfloat16")
]  # fmt: skip


@pytest.mark.parametrize(("layout", "dtype"), SHAPES)
def test_registers_are_those_declared_and_nothing_is_serialised(
    layout, dtype, tmp_path, monkeypatch
):
    monkeypatch.setenv("SIMATTN_CACHE_DIR", "")
    text = ptx(Kernel("sm90", layout, dtype), (9, 0))
    assert text.count(".param .align 64 .b8 flash_sm90_param_") == 4  # tensor maps
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
