"""Read a DLPack capsule: address, shape, strides and dtype of a tensor whose library is unknown.

Layout from the DLPack specification, ``dlpack.h``: ``DLManagedTensor`` begins with a ``DLTensor``.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .tensors import Tensor, _asked, contiguous

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


def dlpack_view(name: str, x: Any, stream: int | None = None) -> Tensor:
    """Describe a tensor on a CUDA device through its DLPack capsule, which is kept alive.

    The producer makes ``stream`` wait for its own work; for None, any stream may read it then.
    """
    what = f"DLPack of {type(x).__name__}"
    kind, device = _asked(name, what, lambda: tuple(map(int, x.__dlpack_device__())))
    if kind != CUDA:
        raise ValueError(f"{name}: {type(x).__name__} must be on a CUDA device")
    # 1 is the legacy default stream, which CUDA also calls 0, and DLPack does not.
    capsule = _asked(name, what, lambda: x.__dlpack__(stream=stream or 1))
    tensor = _asked(name, what, lambda: _described(name, x, capsule))
    if stream is None:
        from .driver import wait_for

        wait_for(1, device)
    return tensor


def _described(name: str, x: Any, capsule: Any) -> Tensor:
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    t = _DLTensor.from_address(pointer_of(capsule, b"dltensor"))
    if t.ndim < 0:
        raise ValueError(f"{t.ndim} dimensions")
    shape = tuple(t.shape[: t.ndim])
    strides = tuple(t.strides[: t.ndim]) if t.strides else contiguous(shape)
    dtype = DTYPES.get((t.code, t.bits)) or f"{KINDS.get(t.code, 'unknown')}{t.bits}"
    if t.lanes != 1:
        dtype += f"x{t.lanes}"
    return Tensor(
        name, "other", (t.data or 0) + t.byte_offset, shape, strides, dtype,
        max(1, t.bits // 8), t.device_id, (x, capsule),
    )  # fmt: skip
