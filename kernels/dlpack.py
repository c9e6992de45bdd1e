"""Read a DLPack capsule: address, shape, strides and dtype of a tensor whose library is unknown.

Layout from the DLPack specification, ``dlpack.h``: ``DLManagedTensor`` begins with a ``DLTensor``.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .tensors import Tensor, contiguous

CUDA = 2
DTYPES = {(2, 16): "float16", (2, 32): "float32", (2, 64): "float64", (4, 16): "bfloat16"}
KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def dlpack_view(name: str, x: Any) -> Tensor:
    """Describe a tensor on a CUDA device through its DLPack capsule, which is kept alive."""
    device_type, _ = x.__dlpack_device__()
    if int(device_type) != CUDA:
        raise ValueError(f"{name}: {type(x).__name__} must be on a CUDA device")
    capsule = x.__dlpack__(stream=1)  # ready for work on the legacy default stream
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    t = _DLTensor.from_address(pointer_of(capsule, b"dltensor"))
    dtype = DTYPES.get((t.code, t.bits)) if t.lanes == 1 else None
    shape = tuple(t.shape[: t.ndim])
    strides = tuple(t.strides[: t.ndim]) if t.strides else contiguous(shape)
    return Tensor(
        name, "other", (t.data or 0) + t.byte_offset, shape, strides,
        dtype or f"{KINDS.get(t.code, 'unknown')}{t.bits}", max(1, t.bits // 8), t.device_id,
        (x, capsule),
    )  # fmt: skip
