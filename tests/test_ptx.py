"""References of the instructions against plain matrix algebra, and the texts that Numba emits."""

from __future__ import annotations

import re

import numpy as np
import pytest
import toolkit

pytest.importorskip("numba_cuda", reason="kernels are written against numba.cuda")

import ml_dtypes
from hypothesis import given
from hypothesis import strategies as st

from kernels import ptx, ptx_hopper, ptxas
from kernels._cuda import SIMULATOR, cuda, types

pytestmark = pytest.mark.skipif(SIMULATOR, reason="compiles for a GPU")
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


NAMED = {
    name: x
    for module in (ptx, ptx_hopper)
    for name, x in vars(module).items()
    if ptx.meaning(x) is not None and ptx.meaning(x).text
}


class OneWarp:
    """As much of a warp as a reference needs that touches no memory."""

    def together(self, what):
        return True


def reference(value, *operands):
    return ptx.meaning(value).reference(OneWarp(), *operands)


def pairs(low, high, dtype):
    """Registers that hold two 16-bit elements."""
    return np.stack((low, high), axis=-1).astype(dtype).view(np.uint32)[..., 0]


@pytest.mark.parametrize(
    ("mma", "dtype"), [(ptx.mma_f16, np.float16), (ptx.mma_bf16, ml_dtypes.bfloat16)]
)
def test_mma_16_is_a_product_of_the_documented_fragments(mma, dtype):
    rng = np.random.default_rng(0)
    A, B = (
        rng.standard_normal(shape).astype(dtype).astype(np.float32) for shape in ((16, 16), (16, 8))
    )
    C = rng.standard_normal((16, 8)).astype(np.float32)
    a = [pairs(A[G + r, 2 * T + c], A[G + r, 2 * T + c + 1], dtype) for c in (0, 8) for r in (0, 8)]
    b = [pairs(B[2 * T + r, G], B[2 * T + r + 1, G], dtype) for r in (0, 8)]
    c = [C[G + r, 2 * T + e] for r in (0, 8) for e in (0, 1)]
    d = reference(mma, *a, *b, *c)
    right = A @ B + C
    for got, (r, e) in zip(d, ((0, 0), (0, 1), (8, 0), (8, 1)), strict=True):
        np.testing.assert_allclose(got, right[G + r, 2 * T + e], rtol=1e-5, atol=1e-5)


def test_mma_tf32_is_a_product_of_the_documented_fragments():
    rng = np.random.default_rng(0)
    exact = [rng.integers(-8, 8, shape).astype(np.float32) for shape in ((16, 8), (8, 8))]
    A, B = exact
    a = [A[G + r, T + c].view(np.uint32) for c in (0, 4) for r in (0, 8)]
    b = [B[T + r, G].view(np.uint32) for r in (0, 4)]
    c = [np.zeros(32, np.float32)] * 4
    d = reference(ptx.mma_tf32, *a, *b, *c)
    for got, (r, e) in zip(d, ((0, 0), (0, 1), (8, 0), (8, 1)), strict=True):
        assert (got == (A @ B)[G + r, 2 * T + e]).all()
    noisy = [x | np.uint32(0x1FFF) for x in a]  # the bits that are ignored
    assert all(
        (x == y).all() for x, y in zip(reference(ptx.mma_tf32, *noisy, *b, *c), d, strict=True)
    )


@given(st.lists(st.floats(width=32), min_size=32, max_size=32))
def test_rounding_to_16_bits_is_that_of_numpy_and_ml_dtypes(values):
    x = np.array(values, np.float32)
    with np.errstate(all="ignore"):
        for pack, dtype in ((ptx.pack_f16, np.float16), (ptx.pack_bf16, ml_dtypes.bfloat16)):
            packed = reference(pack, x, -x)
            halves = packed[:, None].view(np.uint16).view(dtype).astype(np.float32)
            np.testing.assert_array_equal(halves[:, 0], x.astype(dtype).astype(np.float32))
            np.testing.assert_array_equal(halves[:, 1], (-x).astype(dtype).astype(np.float32))
        for widen, pack in ((ptx.widen_f16, ptx.pack_f16), (ptx.widen_bf16, ptx.pack_bf16)):
            once = reference(widen, reference(pack, x, x))
            np.testing.assert_array_equal(reference(widen, reference(pack, once, once)), once)


@given(
    st.floats(
        width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100
    )
)
def test_tf32_is_the_nearest_value_of_10_bits(value):
    x = np.full(32, value, np.float32)
    rounded = reference(ptx.to_tf32, x).view(np.float32)
    assert ((rounded.view(np.uint32) & 0x1FFF) == 0).all()
    assert abs(float(rounded[0]) - value) <= 2.0**-11 * abs(value) + 2.0**-149 * 2**12


def test_every_instruction_is_documented_and_its_text_numbers_its_operands():
    assert len(NAMED) > 50
    for name, x in NAMED.items():
        entry = ptx.meaning(x)
        assert entry.name == name
        assert entry.reference.__doc__, name
        numbers = {int(x) for x in re.findall(r"\$(\d+)", entry.text)}
        assert numbers == set(range(len(entry.outs) + len(entry.ins))), name


ALL_TYPES = types.void(types.uint64, types.uint32, types.float32)


def _calls_all():
    """A kernel that calls each instruction once, by its source."""
    lines = [
        "def kernel(address, word, number):",
        "    smem = cuda.shared.array(0, types.uint8)",
        "    base = shared_address(smem)",
    ]
    names = dict(NAMED, cuda=cuda, types=types, shared_address=ptx.shared_address, u32=ptx.u32)
    operand = {"r": "u32(word + base)", "l": "address", "f": "number"}
    store = {"r": "st_global_b32(address, {})", "f": "st_global_f32(address, {})"}
    for name, x in NAMED.items():
        entry = ptx.meaning(x)
        lines.append(f"    x = {name}({', '.join(operand[letter] for letter in entry.ins)})")
        values = ["x"] if len(entry.outs) == 1 else [f"x[{i}]" for i in range(len(entry.outs))]
        for letter, value in zip(entry.outs, values, strict=True):
            lines.append(
                "    " + store.get(letter, "st_global_b32(address, u32({}))").format(value)
            )
    exec("\n".join(lines), names)
    return names["kernel"]


@pytest.mark.skipif(not toolkit.is_here(), reason="needs the CUDA compiler (extra: cu13)")
def test_numba_compiles_every_instruction():
    text, _ = cuda.compile(
        _calls_all(), ALL_TYPES, device=False,
        abi="numba", cc=(9, 0, "a"), output="ptx",
    )  # fmt: skip
    if ptxas.find_ptxas() is not None:
        ptxas.assemble(_calls_all(), ALL_TYPES, "sm_90a", threads=32)
    for x in NAMED.values():
        for mnemonic in re.findall(r"[a-z]\w*(?:[.:]+\w+)+", ptx.meaning(x).text):
            assert mnemonic in text, mnemonic


def test_an_instruction_outside_a_kernel_says_so():
    entry = ptx.meaning(ptx.ex2)
    with pytest.raises(
        RuntimeError, match=r"ex2: runs in a kernel, on a GPU or under kernels\.emulate"
    ):
        entry(1.0)
