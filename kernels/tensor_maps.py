"""Tensor maps: how Hopper's tensor copies (TMA) are told where a tensor lies.

A map is 128 bytes that the driver makes and the hardware reads, from the kernel's parameters: so
each launch has its own, and nothing is kept in global memory. Numba knows no parameters of 128
bytes; `with_maps` changes the declarations of those that it took for addresses.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

from .driver import check, direct
from .problem import DTYPES

MAP_BYTES, MAP_ALIGNMENT = 128, 64
COLUMNS = 64  # of a box: 128 bytes of a 16-bit type, the swizzle's width
ELEMENT = {"float16": 6, "bfloat16": 9}  # CU_TENSOR_MAP_DATA_TYPE_*
NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_L2_128B, FILL_ZEROS = 0, 3, 2, 0
MOST_STRIDE = 2**40  # bytes, exclusive


def encoder(
    shape: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    dtype: str,
    rows: int,
) -> Callable[[int], bytes]:
    """``encode(address)``: the map of a tensor there, in boxes of ``rows`` x 64 elements.

    ``shape`` is (batch, heads, rows, width), ``strides`` (batch, head, row) in elements. Rows are
    aligned to 16 bytes; what a box has outside the tensor is read as zeros and not written.
    """
    size = DTYPES[dtype]
    batch, head, row = (max(16, step * size) for step in strides)
    dims = (ctypes.c_uint64 * 4)(*reversed(shape))
    steps = (ctypes.c_uint64 * 3)(row, head, batch)
    box, every = (ctypes.c_uint32 * 4)(COLUMNS, rows, 1, 1), (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    element = ELEMENT[dtype]

    def encode(address: int) -> bytes:
        made = _Map()
        at = -ctypes.addressof(made) % MAP_ALIGNMENT
        status = direct().cuTensorMapEncodeTiled(
            ctypes.addressof(made) + at, element, 4, address, dims, steps, box, every,
            NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_L2_128B, FILL_ZEROS,
        )  # fmt: skip
        if status:
            check((status,))
        return bytes(made)[at : at + MAP_BYTES]

    return encode


_Map = ctypes.c_char * (MAP_BYTES + MAP_ALIGNMENT)


def with_maps(ptx: str, entry: str, count: int) -> str:
    """The kernel with tensor maps for its first ``count`` parameters, which were 64-bit numbers.

    >>> print(with_maps("k( .param .u64 k_param_0, ld.param.b64 %rd1, [k_param_0];", "k", 1))
    k( .param .align 64 .b8 k_param_0[128], mov.b64 %rd1, k_param_0; cvta.param.u64 %rd1, %rd1;
    """
    for i in range(count):
        name = f"{entry}_param_{i}"
        ptx, declared = re.subn(
            rf"\.param \.[ub]64 {name}\b",
            f".param .align {MAP_ALIGNMENT} .b8 {name}[{MAP_BYTES}]",
            ptx,
        )
        ptx = re.sub(
            rf"ld\.param\.[ub]64\s+(%\w+), \[{name}\];",
            rf"mov.b64 \1, {name}; cvta.param.u64 \1, \1;",
            ptx,
        )
        if declared != 1 or f"[{name}]" in ptx:
            raise ValueError(f"ptx: parameter {i} of {entry} is not a 64-bit number read whole")
    return ptx
