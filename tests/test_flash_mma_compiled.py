"""The tensor-core kernel compiled for sm_80 and sm_90a, without a GPU: registers as declared.

`SHAPES` is a width of each row of the layouts' table; all widths, in `python -m kernels.ptxas`.
"""

from __future__ import annotations

import pytest
import toolkit

pytest.importorskip("numba_cuda", reason="kernels are written against numba.cuda")

from kernels import ptxas
from kernels._cuda import SIMULATOR
from kernels.mma_layout import layout_for

if SIMULATOR or not toolkit.is_here() or ptxas.find_ptxas() is None:
    pytest.skip("needs the CUDA compiler and ptxas (extra: cu13)", allow_module_level=True)

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
SHAPES = {  # target, dtype, width: registers a thread, at most
    ("sm_80", "float16", 64): 224,
    ("sm_80", "float16", 128): 255,
    ("sm_80", "float16", 192): 208,
    ("sm_80", "float16", 256): 240,
    ("sm_80", "float32", 64): 255,
    ("sm_80", "float32", 128): 240,
    ("sm_80", "float32", 256): 240,
    ("sm_90a", "float16", 64): 224,
    ("sm_90a", "float16", 112): 240,
    ("sm_90a", "float16", 128): 255,
    ("sm_90a", "float16", 192): 216,
    ("sm_90a", "float16", 256): 248,
    ("sm_90a", "float32", 64): 255,
    ("sm_90a", "float32", 128): 240,
    ("sm_90a", "float32", 256): 240,
    ("sm_80", "bfloat16", 64): 224,
    ("sm_90a", "bfloat16", 128): 255,
}
QUICK = {("sm_80", "float16", 64), ("sm_90a", "float16", 128), ("sm_90a", "float32", 64)}


def _marked(shape):
    return pytest.param(*shape, marks=[] if shape in QUICK else [pytest.mark.slow])


@pytest.mark.parametrize(("target", "dtype", "width"), [_marked(shape) for shape in SHAPES])
def test_nothing_spills_and_the_tensor_cores_are_used(target, dtype, width):
    layout = layout_for(
        width, width, itemsize=ITEMSIZE[dtype], capability=ptxas.TARGETS[target][:2]
    )
    done = ptxas.flash_mma(layout, dtype, target)
    assert done.clean, done
    assert done.registers <= SHAPES[target, dtype, width]
    assert done.registers * layout.threads * layout.min_blocks <= 65536
    assert done.instructions["mma.sync"] == layout.mma_count
    assert done.instructions["cp.async"] > 0
    assert done.instructions["ldmatrix.sync"] > 0
