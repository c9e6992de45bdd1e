"""What a kernel needs to know of a tensor, whatever library it comes from.

A container is recognised by where its type was defined, so that no library is imported that the
caller does not use. NumPy arrays live on the host and are copied both ways by ``launch.py``;
everything else is used where it lies.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from .problem import shown

T = TypeVar("T")

TAKEN = "NumPy, Numba, CuPy arrays, torch tensors, and what has __cuda_array_interface__ or DLPack"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A view of somebody's memory: address of the first element, shape, and strides in elements."""

    name: str
    container: str  # numpy, numba, cupy, torch or other
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    device: int | None  # None: host memory
    source: Any  # keeps the memory alive
    readonly: bool = False

    @property
    def span(self) -> tuple[int, int]:
        """First address, and one past the last; equal if empty."""
        if 0 in self.shape:
            return self.pointer, self.pointer
        ends = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        low, high = sum(min(0, x) for x in ends), sum(max(0, x) for x in ends)
        return self.pointer + low * self.itemsize, self.pointer + (high + 1) * self.itemsize

    def kernel_strides(self) -> tuple[int, int, int]:
        """(batch, head, row) in elements, the leading dimensions merged into one.

        Raises
        ------
        ValueError
            If the last axis is not contiguous, or the leading dimensions do not merge.
        """
        if 0 in self.shape:
            return 0, 0, 0
        *lead, rows, width = zip(self.shape, self.strides, strict=True)
        if width[0] > 1 and width[1] != 1:
            raise ValueError(f"{self.name}: last axis has stride {width[1]}, it must be contiguous")
        head = lead.pop()[1] if lead else 0
        return _merged(self, [dim for dim in lead if dim[0] > 1]), head, rows[1]


def view(name: str, x: Any, stream: int | None = None) -> Tensor:
    """Describe ``x``, or say why the kernels cannot take it.

    ``stream`` is the handle of the stream that will read or write the memory; None: any may. What
    another library queued for this memory is waited for, unless it is on that stream.

    >>> view("q", np.zeros((3, 8), np.float32)[::2]).strides
    (16, 1)
    """
    if isinstance(x, type):
        raise TypeError(f"{name}: the class {x.__name__} is not taken, only its instances")
    match _library(x):
        case "torch":
            return _sound(_torch_view(name, x))
        case "numpy":
            return _numpy_view(name, x)
        case "cupy":
            return _sound(_cupy_view(name, x))
        case "numba":
            from ._cuda import SIMULATOR

            if SIMULATOR:
                raise TypeError(f"{name}: the simulator takes NumPy arrays, not {type(x).__name__}")
    if _speaks(name, x, "__cuda_array_interface__"):
        return _sound(_cuda_array_view(name, x, stream))
    if _speaks(name, x, "__dlpack__") and _speaks(name, x, "__dlpack_device__"):
        from .dlpack import dlpack_view

        return _sound(dlpack_view(name, x, stream))
    raise TypeError(f"{name}: {type(x).__name__} is not taken; the kernels take {TAKEN}")


def views(
    q: Any, k: Any, v: Any, out: Any, stream: Any
) -> tuple[list[Tensor], Tensor | None, int | None]:
    """q, k and v; out, if there is one; and the handle of the stream to launch on.

    The handle is None for NumPy arrays without a stream: they go to the GPU first.
    """
    handle = handle_of(stream)
    # Without the caller's word, what is not torch's or CuPy's runs on the default stream.
    first = view("q", q, 0 if handle is None else handle)
    if handle is None and first.container != "numpy":
        handle = stream_of(first, None)
    rest = [view(name, x, handle) for name, x in (("k", k), ("v", v))]
    return [first, *rest], None if out is None else view("out", out, handle), handle


def stream_of(q: Tensor, stream: Any) -> int:
    """The handle of the stream to launch on: the caller's, else q's library's current one."""
    handle = handle_of(stream)
    if handle is not None:
        return handle
    if q.container == "torch":
        return torch_stream(q.device or 0)
    if q.container == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream().ptr
    return 0  # CUDA's default stream, and Numba's


def torch_stream(device: int) -> int:
    """The handle of torch's current stream, without an object around it where torch can."""
    torch = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw(device) if raw else torch.cuda.current_stream(device).cuda_stream


def handle_of(stream: Any) -> int | None:
    """The handle of the caller's stream; None if there is none.

    An integer is a handle; torch, CuPy and Numba streams and ``__cuda_stream__`` are understood.
    """
    if stream is None:
        return None
    is_number = isinstance(stream, int | np.integer) and not isinstance(stream, bool)
    handle: Any = stream if is_number else _stream_handle(stream)
    if not is_number and handle is None:
        raise TypeError(
            f"stream: {shown(stream)} must be None, an integer handle, a Numba, torch or CuPy "
            "stream, or have __cuda_stream__"
        )
    if not 0 <= handle < 2**64:
        raise ValueError(f"stream: handle {shown(handle)} must be 0 to 2**64 - 1")
    return int(handle)


def _stream_handle(stream: Any) -> int | None:
    """The handle of a stream object, or None for what is none."""
    if isinstance(stream, type):
        return None
    if _speaks("stream", stream, "__cuda_stream__"):

        def ask() -> int:
            protocol = stream.__cuda_stream__
            _, handle = protocol() if callable(protocol) else protocol
            return operator.index(handle)

        return _asked("stream", f"__cuda_stream__ of {type(stream).__name__}", ask)
    for attribute in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, Numba
        if _speaks("stream", stream, attribute):
            handle = getattr(stream, attribute)
            handle = getattr(handle, "value", handle) or 0
            return _asked("stream", attribute, lambda h=handle: int(h))
    if _library(stream) == "numba":
        from ._cuda import SIMULATOR

        return 0 if SIMULATOR and type(stream).__name__.lower() == "stream" else None
    return None


def empty(like: Tensor, shape: tuple[int, ...], dtype: str, stream: int) -> Any:
    """Uninitialised memory on the same device, in q's container, for work on this stream.

    ``dtype`` is q's own, or float32. A container that we do not know gets Numba's arrays.
    """
    match like.container:
        case "torch":
            torch = sys.modules["torch"]
            with _torch_stream(torch, stream, like.device):
                kind = getattr(torch, dtype)
                return torch.empty(shape, dtype=kind, device=like.source.device)
        case "cupy":
            cupy = sys.modules["cupy"]
            kind = like.source.dtype if dtype == like.dtype else np.dtype(dtype)
            with cupy.cuda.Device(like.device), _cupy_stream(cupy, stream):
                return cupy.empty(shape, kind)
    from ._cuda import cuda

    with cuda.gpus[like.device]:
        return cuda.device_array(shape, np.dtype(dtype))


def check_out(out: Tensor, shape: tuple[int, ...], inputs: list[Tensor]) -> None:
    """``out`` has the result's shape and dtype, and a place of its own for each element."""
    q = inputs[0]
    if out.shape != shape:
        raise ValueError(f"out: shape {out.shape} must be {shape}")
    if out.dtype != q.dtype:
        raise TypeError(f"out: dtype {out.dtype} must be q's, {q.dtype}")
    if out.device != q.device:
        raise ValueError(f"out: is on {_where(out)}, it must be with q on {_where(q)}")
    if out.readonly:
        raise ValueError("out: array is read-only")
    if 0 in out.shape:
        return
    if out.container == "numpy":
        _in_elements("out", out.source.strides, out.itemsize)
    if out.shape[-1] > 1 and out.strides[-1] != 1:
        raise ValueError(f"out: last axis has stride {out.strides[-1]}, it must be contiguous")
    reach = 1
    dims = [(abs(step), n) for n, step in zip(out.shape, out.strides, strict=True) if n > 1]
    for step, n in sorted(dims):
        if step < reach:
            raise ValueError(f"out: strides {out.strides} put two elements in one place")
        reach += step * (n - 1)
    first, end = out.span
    for x in inputs:
        if x.device == out.device and first < x.span[1] and x.span[0] < end:
            raise ValueError(f"out: its memory range overlaps {x.name}'s")


def check_alike(inputs: list[Tensor]) -> None:
    """One dtype, one device; NumPy arrays only among themselves."""
    q = inputs[0]
    for x in inputs[1:]:
        if x.dtype != q.dtype:
            raise TypeError(f"{x.name}: dtype {x.dtype} must be q's, {q.dtype}")
        mixed = (x.device is None) != (q.device is None)
        if mixed or (x.device != q.device and 0 not in x.shape):
            raise ValueError(f"{x.name}: is on {_where(x)}, it must be with q on {_where(q)}")


def _where(x: Tensor) -> str:
    return "the host" if x.device is None else f"device {x.device}"


def _asked(name: str, what: str, ask: Callable[[], T]) -> T:
    """What a foreign object answers; its failure, whatever it is, becomes one line."""
    try:
        return ask()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{name}: {what} is not usable: {reason}") from error


def _speaks(name: str, x: Any, attribute: str) -> bool:
    return _asked(name, attribute, lambda: hasattr(x, attribute))


def _sound(x: Tensor) -> Tensor:
    """Memory that a kernel can address: sizes that make sense, and aligned elements."""
    if any(n < 0 for n in x.shape):
        raise ValueError(f"{x.name}: shape {x.shape} must not be negative")
    if x.pointer == 0 and 0 not in x.shape:
        raise ValueError(f"{x.name}: address is null, though its shape {x.shape} is not empty")
    if x.pointer % x.itemsize:
        raise ValueError(
            f"{x.name}: address {x.pointer:#x} must be a multiple of its elements' {x.itemsize} "
            "bytes"
        )
    return x


def _library(x: Any) -> str:
    """The top-level package that defines x's type, or the nearest base that we know."""
    for base in type(x).__mro__:
        package = base.__module__.partition(".")[0]
        if package in ("torch", "numpy", "cupy"):
            return package
        if package in ("numba", "numba_cuda"):
            return "numba"
    return "other"


def _merged(x: Tensor, lead: list[tuple[int, int]]) -> int:
    for (_, outer), (n, inner) in pairwise(lead):
        if outer != n * inner:
            raise ValueError(
                f"{x.name}: leading dimensions of shape {x.shape} and strides {x.strides} do not "
                "merge into one batch; pass a contiguous copy"
            )
    return lead[-1][1] if lead else 0


def _in_elements(name: str, strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    if any(stride % itemsize for stride in strides):
        raise ValueError(f"{name}: strides {strides} must be multiples of its {itemsize} bytes")
    return tuple(stride // itemsize for stride in strides)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _numpy_view(name: str, x: Any) -> Tensor:
    if not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name}: {type(x).__name__} is not taken; the kernels take {TAKEN}")
    strides = tuple(stride // max(1, x.itemsize) for stride in x.strides)
    return Tensor(
        name, "numpy", x.__array_interface__["data"][0], x.shape, strides,
        x.dtype.name, x.itemsize, None, x, not x.flags.writeable,
    )  # fmt: skip


def _torch_view(name: str, x: Any) -> Tensor:
    torch = sys.modules["torch"]
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: {type(x).__name__} is not taken; the kernels take {TAKEN}")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: layout {x.layout} is not taken, only strided tensors")
    if x.device.type != "cuda":
        raise ValueError(f"{name}: is on device {x.device}; torch tensors must be on a CUDA device")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: requires a gradient, and the kernels have no backward yet; "
            "call under torch.no_grad() or pass a detached tensor"
        )
    if x.is_neg() or x.is_conj():
        raise ValueError(f"{name}: is a lazy negation or conjugate; resolve it first")
    return Tensor(
        name, "torch", x.data_ptr(), tuple(x.shape), x.stride(),
        str(x.dtype).removeprefix("torch."), x.element_size(), x.device.index, x,
    )  # fmt: skip


def _cupy_view(name: str, x: Any) -> Tensor:
    if not isinstance(x, sys.modules["cupy"].ndarray):
        raise TypeError(f"{name}: {type(x).__name__} is not taken; the kernels take {TAKEN}")
    return Tensor(
        name, "cupy", x.data.ptr, x.shape, _in_elements(name, x.strides, x.itemsize),
        x.dtype.name, x.itemsize, x.device.id, x,
    )  # fmt: skip


def _cuda_array_view(name: str, x: Any, stream: int | None) -> Tensor:
    what = "__cuda_array_interface__"
    mask, dtype, shape, strides, pointer, readonly, producer = _asked(
        name, what, lambda: _parsed(x.__cuda_array_interface__)
    )
    if mask is not None:
        raise TypeError(f"{name}: masked arrays are not taken")
    if dtype.byteorder not in "=|" and dtype.newbyteorder("=") != dtype:
        raise TypeError(f"{name}: dtype {dtype} must be in this machine's byte order")
    elements = contiguous(shape) if strides is None else _in_elements(name, strides, dtype.itemsize)
    tensor = Tensor(
        name, _library(x), pointer, shape, elements, dtype.name, max(1, dtype.itemsize), 0, x,
        readonly,
    )  # fmt: skip
    from .driver import device_of, wait_for

    tensor = replace(_sound(tensor), device=device_of(pointer))
    legacy = (0, 1)  # two names of the default stream
    same = producer == stream or (producer in legacy and stream in legacy)
    if producer is not None and not same:
        wait_for(producer, tensor.device or 0)
    return tensor


def _parsed(interface: Any) -> tuple[Any, ...]:
    """mask, dtype, shape, strides in bytes, address, read-only, stream."""
    typestr, strides = interface["typestr"], interface.get("strides")
    if not isinstance(typestr, str):
        raise TypeError(f"typestr {typestr!r}")
    shape = tuple(operator.index(n) for n in interface["shape"])
    if strides is not None:
        strides = tuple(operator.index(step) for step in strides)
        if len(strides) != len(shape):
            raise ValueError(f"strides {strides} for shape {shape}")
    address, readonly = interface["data"]
    return (
        interface.get("mask"), np.dtype(typestr), shape, strides, operator.index(address or 0),
        bool(readonly), handle_of(interface.get("stream")),
    )  # fmt: skip


@contextmanager
def _torch_stream(torch: Any, handle: int, device: int | None) -> Iterator[None]:
    """Allocate for this stream, so that torch's allocator does not reuse the memory too early."""
    if handle == torch.cuda.current_stream(device).cuda_stream:
        yield
    else:
        with torch.cuda.stream(torch.cuda.ExternalStream(handle, device=device)):
            yield


def _cupy_stream(cupy: Any, handle: int) -> AbstractContextManager[Any]:
    """The same for CuPy's memory pool."""
    if handle == cupy.cuda.get_current_stream().ptr:
        return nullcontext()
    return cupy.cuda.ExternalStream(handle)
