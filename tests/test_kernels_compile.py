"""What the compiler makes of the kernels, without a GPU: registers only, 16-byte loads, float32."""

from __future__ import annotations

import os

import pytest
import toolkit

from kernels.layout import choose
from kernels.problem import VARIANTS

if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("the simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda")

if not toolkit.is_here():
    pytest.skip("needs the CUDA compiler libraries (extra: cu13)", allow_module_level=True)

H200 = {"shared_per_block": 232448, "shared_per_sm": 233472}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("d", "e", "dtype"),
    [
        (64, 64, "float32"),
        (128, 128, "float16"),
        (256, 256, "bfloat16"),
    ],
)
def test_arrays_become_registers_and_loads_16_bytes(variant, d, e, dtype, monkeypatch) -> None:
    monkeypatch.setenv("SIMATTN_CACHE_DIR", "")
    from kernels.compiled import Kernel, ptx

    layout = choose(variant, d, e, **H200)
    text = ptx(Kernel(variant, layout, dtype), (9, 0))
    assert ".local" not in text
    assert ".f64" not in text
    operands = layout.MR + layout.MC  # of S = Q K^T, and MR of P V
    assert text.count("ld.shared.v4.f32") >= operands + layout.MR
    assert f".maxntid {layout.threads}" in text
    assert text.count("bar.sync") == {"q_outer": 5, "kv_outer": 6}[variant]
