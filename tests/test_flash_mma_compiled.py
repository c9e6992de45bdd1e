"""The tensor-core kernel compiled for sm_80 and sm_90a, without a GPU: registers as declared.

Each row of the layouts' table; all equal widths, in `python -m kernels.ptxas`.
"""

from __future__ import annotations

import pytest
import toolkit

pytest.importorskip("numba_cuda", reason="kernels are written against numba.cuda")

from kernels import ptxas
from kernels._cuda import SIMULATOR
from kernels.mma_layout import LAYOUTS, layout_for

if SIMULATOR or not toolkit.is_here() or ptxas.find_ptxas() is None:
    pytest.skip("needs the CUDA compiler and ptxas (extra: cu13)", allow_module_level=True)

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
SHAPES = {  # target, dtype, the widest of a row of the table: registers a thread, at most
    ("sm_80", "float16", 64, 64): 224,
    ("sm_80", "float16", 128, 128): 240,
    ("sm_80", "float16", 192, 192): 208,
    ("sm_80", "float16", 256, 256): 240,
    ("sm_80", "float32", 64, 64): 255,
    ("sm_80", "float32", 128, 128): 240,
    ("sm_80", "float32", 256, 256): 248,
    ("sm_90a", "float16", 64, 64): 232,
    ("sm_90a", "float16", 128, 64): 255,
    ("sm_90a", "float16", 112, 96): 255,
    ("sm_90a", "float16", 128, 112): 248,
    ("sm_90a", "float16", 112, 128): 255,
    ("sm_90a", "float16", 128, 128): 255,
    ("sm_90a", "float16", 192, 192): 224,
    ("sm_90a", "float16", 256, 256): 248,
    ("sm_90a", "float32", 64, 64): 255,
    ("sm_90a", "float32", 128, 128): 240,
    ("sm_90a", "float32", 256, 256): 248,
    ("sm_80", "bfloat16", 64, 64): 224,
    ("sm_90a", "bfloat16", 128, 128): 255,
}
QUICK = {
    ("sm_80", "float16", 64, 64), ("sm_90a", "float16", 128, 128), ("sm_90a", "float32", 64, 64),
}  # fmt: skip


def _marked(shape):
    return pytest.param(*shape, marks=[] if shape in QUICK else [pytest.mark.slow])


def test_every_row_of_the_tables_is_here():
    rows = {
        (target, dtype, d, e)
        for target, capability in ptxas.TARGETS.items()
        for dtype in ("float16", "float32")
        for d, e, _ in LAYOUTS[ITEMSIZE[dtype], capability >= (9, 0)]
    }
    assert rows == {shape for shape in SHAPES if shape[1] != "bfloat16"}


@pytest.mark.parametrize(("target", "dtype", "d", "e"), [_marked(shape) for shape in SHAPES])
def test_nothing_spills_and_the_tensor_cores_are_used(target, dtype, d, e):
    layout = layout_for(d, e, itemsize=ITEMSIZE[dtype], capability=ptxas.TARGETS[target][:2])
    done = ptxas.flash_mma(layout, dtype, target)
    assert done.clean, done
    assert done.registers <= SHAPES[target, dtype, d, e]
    assert done.registers * layout.threads * layout.min_blocks <= 65536
    assert done.instructions["mma.sync"] == layout.mma_count
    assert done.instructions["cp.async"] > 0
    assert done.instructions["ldmatrix.sync"] > 0
