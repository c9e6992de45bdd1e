"""From Python to machine code: Numba makes PTX, the disk keeps it, the driver assembles it.

Numba's own launcher never raises the 48 KiB limit on shared memory and takes ten times as long, so
a kernel is loaded and launched through the driver API (``driver.py``).
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cache, driver
from .driver import Loaded
from .layout import Layout, buffers
from .tensor_maps import with_maps

COMPILER = ("numba", "numba-cuda", "llvmlite")
TOOLKIT = ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12")  # NVVM, which sets PTX's version: cu13's, cu12's
ENTRY = "flash"  # a kernel's name in its PTX begins so, and its variant's name follows


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is compiled: which kernel, its tiles, and the type that tensors are stored in."""

    variant: str
    layout: Any
    dtype: str

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        if isinstance(self.layout, Layout):
            return buffers(self.variant, self.layout).bytes
        return self.layout.shared_bytes

    @property
    def entry(self) -> str:
        return f"{ENTRY}_{self.variant}"


@dataclass(frozen=True, slots=True)
class Built:
    """A kernel on a device, and how long the process waited for it."""

    loaded: Loaded
    seconds: float
    from_disk: bool


_texts: dict[tuple[Kernel, tuple[int, int]], str] = {}
_built: dict[tuple[Kernel, int], Built] = {}
_lock = threading.Lock()


def source(kernel: Kernel) -> tuple[Any, Any]:
    """The kernel's function, and its argument types for Numba."""
    layout, dtype = kernel.layout, kernel.dtype
    match kernel.variant:
        case "mma":
            from . import flash_mma

            return flash_mma.flash_mma(layout, dtype), flash_mma.signature()
        case "sm90":
            from . import flash_sm90

            return flash_sm90.flash_sm90(layout, dtype), flash_sm90.signature()
        case variant:
            from . import flash_simt

            return flash_simt.KERNELS[variant](layout, dtype), flash_simt.signature(variant, dtype)


def ptx(kernel: Kernel, capability: tuple[int, int]) -> str:
    """Assembly text, made at the first call. Needs Numba and the NVVM library, but no GPU."""
    known = _texts.get((kernel, capability))
    if known is not None:
        return known
    from ._cuda import cuda

    function, signature = source(kernel)
    collects = gc.isenabled()
    gc.disable()  # Numba makes garbage by the million, none of which can be freed before it ends
    try:
        text, _ = cuda.compile(
            function, signature, device=False, abi="numba", output="ptx",
            cc=(*capability, "a") if capability >= (9, 0) else capability,
            launch_bounds=(kernel.layout.threads, kernel.layout.min_blocks),
        )  # fmt: skip
    finally:
        if collects:
            gc.enable()
    found = re.search(r"\.visible \.entry\s+(\S+?)\(", text)
    assert found is not None
    text = text.replace(found.group(1), kernel.entry)
    if kernel.variant == "sm90":
        text = with_maps(text, kernel.entry, 4)
    _texts[kernel, capability] = text
    cache.write(_file(kernel, capability), text.encode())
    return text


def load(kernel: Kernel, device: int) -> Built:
    """The kernel, compiled and loaded at the first call; threads that ask together share it."""
    built = _built.get((kernel, device))
    if built is not None:
        return built
    with _lock:
        if (kernel, device) not in _built:
            start = time.perf_counter()
            with driver.on_device(device):
                loaded, from_disk = _load(kernel, device)
            _built[kernel, device] = Built(loaded, time.perf_counter() - start, from_disk)
        return _built[kernel, device]


def _load(kernel: Kernel, device: int) -> tuple[Loaded, bool]:
    """The current context's, from disk if it is there."""
    capability = driver.limits(device).capability
    stored = cache.read(_file(kernel, capability))
    text = stored.decode() if stored is not None else ptx(kernel, capability)
    threads = kernel.layout.threads
    return driver.load(text, kernel.entry, threads, kernel.shared_bytes), stored is not None


def compile_all(kernels: Iterable[Kernel], device: int = 0) -> None:
    """Make many kernels' PTX at once, in processes: Numba compiles one at a time in each."""
    capability = driver.limits(device).capability
    missing = [
        x for x in dict.fromkeys(kernels)
        if (x, capability) not in _texts and cache.read(_file(x, capability)) is None
    ]  # fmt: skip
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=spawn) as pool:
        made = pool.map(ptx, missing, [capability] * len(missing))
        _texts.update(zip(((x, capability) for x in missing), made, strict=True))


def _file(kernel: Kernel, capability: tuple[int, int]) -> str:
    """Its name on disk."""
    return cache.key(repr(kernel), repr(capability), *_versions())


@functools.cache
def _versions() -> tuple[str, ...]:
    """What PTX depends on besides the kernel: the compiler, and this package's own source."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return (
        *(importlib.metadata.version(name) for name in COMPILER),
        *(_version(name) for name in TOOLKIT),
        os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "",
        cache.key(*(file.read_text(encoding="utf-8") for file in files)),
    )


def _version(name: str) -> str:
    """A distribution's; empty if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
