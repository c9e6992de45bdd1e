"""The CUDA driver's calls, all of them: devices, contexts, streams, machine code, launches.

Numba is not needed here: a kernel whose machine code is on disk runs without it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

MOST_STREAMS = 64  # that arguments are ready for


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device offers."""

    shared_per_block: int  # bytes, with opt-in
    shared_per_sm: int  # bytes
    registers_per_sm: int
    capability: tuple[int, int]
    sms: int = 1


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel on a device, and what the compiler made of it."""

    handle: int  # CUfunction
    threads: int
    shared_bytes: int
    registers: int  # a thread
    local_bytes: int  # a thread: spills and arrays that did not become registers
    first: int = 0  # where the parameters begin: tensor maps are aligned to 64 bytes

    def arguments(self, packed: bytes) -> Arguments:
        """Arguments for any number of launches, from those laid out as the parameters are."""
        return Arguments(bytes(self.first) + packed)

    def launch(self, grid: int, stream: int, arguments: Arguments) -> None:
        """Queue it on a stream of the current context."""
        configuration = arguments.configurations.get((grid, stream))
        if configuration is None:
            if len(arguments.configurations) >= MOST_STREAMS:
                arguments.configurations.clear()
            configuration = arguments.configurations[grid, stream] = Configuration(
                grid, 1, 1, self.threads, 1, 1, self.shared_bytes, stream
            )
        status = direct().cuLaunchKernelEx(
            ctypes.addressof(configuration), self.handle, None, arguments.address
        )
        if status:
            check((status,))


class Configuration(ctypes.Structure):
    """CUlaunchConfig: in one place, it takes less time than cuLaunchKernel's many arguments."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class Arguments:
    """A kernel's arguments in one buffer. The driver copies it at each launch."""

    __slots__ = ("_buffer", "_extra", "_size", "address", "configurations")

    def __init__(self, packed: bytes) -> None:
        self.configurations: dict[tuple[int, int], Configuration] = {}  # by grid and stream
        self._buffer = ctypes.create_string_buffer(packed, len(packed))
        self._size = ctypes.c_size_t(len(packed))
        buffer, size = ctypes.addressof(self._buffer), ctypes.addressof(self._size)
        self._extra = (ctypes.c_void_p * 5)(1, buffer, 2, size, 0)  # CU_LAUNCH_PARAM_BUFFER_*
        self.address = ctypes.addressof(self._extra)


def load(ptx: str, entry: str, threads: int, shared_bytes: int) -> Loaded:
    """Assemble for the current context's device; the driver keeps its machine code on disk too."""
    kinds = driver().CUfunction_attribute
    with relaxed_capture():
        module = check(driver().cuModuleLoadData(ptx.encode() + b"\0"))
        handle = check(driver().cuModuleGetFunction(module, entry.encode()))
        most = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        carveout = kinds.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        check(driver().cuFuncSetAttribute(handle, most, shared_bytes))
        check(driver().cuFuncSetAttribute(handle, carveout, 100))  # percent: L1 is of little use
        registers, local_bytes = (
            check(driver().cuFuncGetAttribute(kind, handle))
            for kind in (kinds.CU_FUNC_ATTRIBUTE_NUM_REGS, kinds.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
        )
        first, _ = check(driver().cuFuncGetParamInfo(handle, 0))
    return Loaded(int(handle), threads, shared_bytes, registers, local_bytes, first)


@functools.cache
def constant(device: int, content: bytes) -> int:
    """The address of a copy on the device, which stays: CUDA graphs may hold on to it."""
    with on_device(device), relaxed_capture():
        address = check(driver().cuMemAlloc(len(content)))
        stream = check(driver().cuStreamCreate(1))  # CU_STREAM_NON_BLOCKING: waits for no other
        check(driver().cuMemcpyHtoDAsync(address, content, len(content), stream))
        check(driver().cuStreamSynchronize(stream))
        check(driver().cuStreamDestroy(stream))
    return int(address)


@functools.cache
def limits(device: int) -> Limits:
    """What this device offers."""
    kinds = driver().CUdevice_attribute
    handle = check(driver().cuDeviceGet(device))

    def read(name: str) -> int:
        kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(driver().cuDeviceGetAttribute(kind, handle)))

    return Limits(
        read("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        read("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        read("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        (read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR")),
        read("MULTIPROCESSOR_COUNT"),
    )


def on_device(device: int) -> AbstractContextManager[None]:
    """Make the device's primary context, which every library shares, current in this thread."""
    return nullcontext() if is_current(device) else _pushed(device)


def launch(loaded: Loaded, device: int, grid: int, stream: int, arguments: Arguments) -> None:
    """Queue a kernel on its device, whose context nearly always is current: `with` takes longer."""
    if is_current(device):
        loaded.launch(grid, stream, arguments)
    else:
        with on_device(device):
            loaded.launch(grid, stream, arguments)


@contextmanager
def _pushed(device: int) -> Iterator[None]:
    check(driver().cuCtxPushCurrent(_primary_context(device)))
    try:
        yield
    finally:
        check(driver().cuCtxPopCurrent())


def is_current(device: int) -> bool:
    """Whether the device's primary context is this thread's."""
    current = ctypes.c_void_p()
    direct().cuCtxGetCurrent(ctypes.addressof(current))  # a number: byref takes longer
    return current.value == _address(device)


@functools.cache
def _address(device: int) -> int:
    return int(_primary_context(device))


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread load and allocate while a stream of it is captured into a CUDA graph."""
    mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(driver().cuThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        check(driver().cuThreadExchangeStreamCaptureMode(before))


def device_of(pointer: int) -> int:
    """The ordinal of the device that owns this address; 0 for an empty array's null."""
    if not pointer:
        return 0
    kind = driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(check(driver().cuPointerGetAttribute(kind, pointer)))


@functools.cache
def version() -> str:
    """The newest CUDA version that the driver supports: ``13.0``."""
    number = int(check(driver().cuDriverGetVersion()))
    return f"{number // 1000}.{number % 1000 // 10}"


def wait_for(stream: int, device: int) -> None:
    """Wait until work that a producer queued on its stream is done. 1: the default stream."""
    with on_device(device):
        check(driver().cuStreamSynchronize(0 if stream == 1 else stream))


@functools.cache
def _primary_context(device: int) -> Any:
    return check(driver().cuDevicePrimaryCtxRetain(check(driver().cuDeviceGet(device))))


def need_gpu() -> None:
    """Raise, in one line, where there is no GPU, or a simulator in its place."""
    driver()


@functools.cache
def driver() -> Any:
    """The driver's bindings, initialised."""
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        raise RuntimeError(
            "this needs a GPU, and NUMBA_ENABLE_CUDASIM=1 chose the simulator, which takes NumPy "
            "arrays alone: unset it"
        )
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise ImportError(
            "kernels needs the CUDA driver's bindings, which come with Numba's CUDA target: in a "
            "clone, pip install '.[cu13]' (or '.[cu12]')"
        ) from error
    try:
        (status,) = bindings.cuInit(0)
        devices = bindings.cuDeviceGetCount()[1] if not int(status) else 0
    except RuntimeError:  # no driver library
        devices = 0
    if not devices:
        raise RuntimeError(
            "no CUDA GPU was found. Without one, python -m kernels traffic counts, and "
            "flash_attention runs under Numba's simulator, slowly: NUMBA_ENABLE_CUDASIM=1"
        )
    return bindings


@functools.cache
def direct() -> Any:
    """The driver's library itself, for what every launch calls: the bindings take longer."""
    driver()
    library = ctypes.CDLL("libcuda.so.1")
    number, pointer = ctypes.c_uint32, ctypes.c_void_p
    library.cuLaunchKernelEx.argtypes = (pointer, pointer, pointer, pointer)
    library.cuCtxGetCurrent.argtypes = (pointer,)
    library.cuTensorMapEncodeTiled.argtypes = (
        pointer, number, number, *[pointer] * 5, *[number] * 4,
    )  # fmt: skip
    return library


def check(result: tuple[Any, ...]) -> Any:
    """A driver call's value, or its values, or its error."""
    status, *values = result
    if int(status):
        from cuda.bindings import driver as bindings

        _, text = bindings.cuGetErrorString(bindings.CUresult(int(status)))
        raise RuntimeError(f"CUDA driver: {text.decode() if text else status}")
    return tuple(values) if len(values) > 1 else values[0] if values else None
