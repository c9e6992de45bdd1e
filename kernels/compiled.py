"""Compile a kernel once, load it once a device, launch it: the CUDA driver's calls are all here.

Numba's own launcher never raises the 48 KiB limit on shared memory and takes ten times as long, so
the PTX that Numba makes is loaded and launched through the driver API.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ._cuda import SIMULATOR, cuda, types
from .flash_simt import KERNELS
from .layout import Layout, buffers

STORAGE = {"float32": types.float32, "float16": types.float16, "bfloat16": types.uint16}
_lock = threading.Lock()
_texts: dict[Wanted, str] = {}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device offers a block."""

    shared_per_block: int  # bytes, with opt-in
    shared_per_sm: int  # bytes
    registers_per_sm: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel on a device, and what the compiler made of it."""

    handle: Any
    layout: Layout
    shared_bytes: int
    registers: int  # a thread
    local_bytes: int  # a thread: spills and arrays that did not become registers

    def launch(self, grid: int, stream: int, args: tuple[Any, ...], kinds: tuple[Any, ...]) -> None:
        _check(
            _driver().cuLaunchKernel(
                self.handle, grid, 1, 1, self.layout.threads, 1, 1, self.shared_bytes, stream,
                (args, kinds), 0,
            )
        )  # fmt: skip


def signature(variant: str, dtype: str):
    """A kernel's argument types: pointers, four triples of strides, numbers."""
    tensor, stats = types.CPointer(STORAGE[dtype]), types.CPointer(types.float32)
    statistics = 3 if variant == "kv_outer" else 1  # L; and m, l
    strides = types.UniTuple(types.int64, 3)
    return types.void(
        *[tensor] * 4, *[stats] * statistics, *[strides] * 4,
        *[types.int64] * 8, types.float32, types.int64,
    )  # fmt: skip


def argument_kinds(variant: str) -> tuple[Any, ...]:
    """The same for the driver, which sees a triple as three numbers."""
    pointers = 7 if variant == "kv_outer" else 5
    numbers = [ctypes.c_int64] * (12 + 8)
    return (*[ctypes.c_void_p] * pointers, *numbers, ctypes.c_float, ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A kernel to compile."""

    variant: str
    layout: Layout
    dtype: str
    capability: tuple[int, int]


def ptx(wanted: Wanted) -> str:
    """Assembly text, made at the first call. Needs Numba and the NVVM library, but no GPU."""
    if wanted not in _texts:
        variant, layout, dtype = wanted.variant, wanted.layout, wanted.dtype
        _texts[wanted], _ = cuda.compile(
            KERNELS[variant](layout, dtype),
            signature(variant, dtype),
            device=False,
            abi="numba",
            cc=wanted.capability,
            output="ptx",
            launch_bounds=(layout.threads, layout.min_blocks),
        )
    return _texts[wanted]


def compile_all(wanted: Iterable[Wanted], workers: int | None = None) -> None:
    """Make many kernels' PTX at once, in processes: Numba compiles one at a time in each."""
    missing = [w for w in dict.fromkeys(wanted) if w not in _texts]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers or min(8, os.cpu_count() or 1), mp_context=spawn) as pool:
        _texts.update(zip(missing, pool.map(ptx, missing), strict=True))


def load(variant: str, layout: Layout, dtype: str, device: int) -> Compiled:
    """The kernel, compiled and loaded at the first call; threads that ask together share it."""
    with _lock:
        return _load(variant, layout, dtype, device)


@functools.cache
def _load(variant: str, layout: Layout, dtype: str, device: int) -> Compiled:
    driver = _driver()
    text = ptx(Wanted(variant, layout, dtype, limits(device).capability))
    entry = re.search(r"\.visible \.entry\s+(\S+?)\(", text)
    assert entry is not None
    shared_bytes = buffers(variant, layout).bytes
    attribute = driver.CUfunction_attribute
    with on_device(device):
        module = _check(driver.cuModuleLoadData(text.encode() + b"\0"))
        handle = _check(driver.cuModuleGetFunction(module, entry.group(1).encode()))
        most = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        carveout = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        _check(driver.cuFuncSetAttribute(handle, most, shared_bytes))
        _check(driver.cuFuncSetAttribute(handle, carveout, 100))  # percent: L1 is of little use
        registers, local_bytes = (
            _check(driver.cuFuncGetAttribute(kind, handle))
            for kind in (
                attribute.CU_FUNC_ATTRIBUTE_NUM_REGS,
                attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
            )
        )
    return Compiled(handle, layout, shared_bytes, registers, local_bytes)


@functools.cache
def limits(device: int) -> Limits:
    driver = _driver()
    kinds = driver.CUdevice_attribute
    handle = _check(driver.cuDeviceGet(device))

    def read(name: str) -> int:
        kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_check(driver.cuDeviceGetAttribute(kind, handle)))

    return Limits(
        read("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        read("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        read("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        (read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR")),
    )


@contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make the device's primary context, which every library shares, current in this thread."""
    _check(_driver().cuCtxPushCurrent(_primary_context(device)))
    try:
        yield
    finally:
        _check(_driver().cuCtxPopCurrent())


def device_of(pointer: int) -> int:
    """The ordinal of the device that owns this address; 0 for an empty array's null."""
    if not pointer:
        return 0
    driver = _driver()
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(_check(driver.cuPointerGetAttribute(kind, pointer)))


def driver_version() -> str:
    """The newest CUDA version that the driver supports: ``13.0``."""
    version = int(_check(_driver().cuDriverGetVersion()))
    return f"{version // 1000}.{version % 1000 // 10}"


def wait_for(stream: int, device: int) -> None:
    """Wait until work that a producer queued on its stream is done. 1: the default stream."""
    with on_device(device):
        _check(_driver().cuStreamSynchronize(0 if stream == 1 else stream))


@functools.cache
def _primary_context(device: int) -> Any:
    driver = _driver()
    return _check(driver.cuDevicePrimaryCtxRetain(_check(driver.cuDeviceGet(device))))


def need_gpu() -> None:
    """Raise, in one line, where there is no GPU, or a simulator in its place."""
    if SIMULATOR:
        raise RuntimeError(
            "this needs a GPU, and NUMBA_ENABLE_CUDASIM=1 chose the simulator, which takes NumPy "
            "arrays alone: unset it"
        )
    if not cuda.is_available():
        raise RuntimeError(
            "no CUDA GPU was found. Without one the kernels run under Numba's simulator, small and "
            "slowly: set NUMBA_ENABLE_CUDASIM=1, or try python -m kernels traffic"
        )


@functools.cache
def _driver() -> Any:
    need_gpu()
    from cuda.bindings import driver

    _check(driver.cuInit(0))
    return driver


def _check(result: tuple[Any, ...]) -> Any:
    """A driver call's value, or its error."""
    status, *values = result
    if int(status):
        from cuda.bindings import driver

        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"CUDA driver: {text.decode() if text else status}")
    return values[0] if values else None
