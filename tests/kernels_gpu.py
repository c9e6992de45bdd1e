"""Is there a GPU? Asked of the driver, so that answering imports no CUDA package."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def device_count() -> int:
    """CUDA devices that this process may use."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
