"""Whether the CUDA compiler's libraries are installed: a GPU is not needed to compile for one."""

from __future__ import annotations


def is_here() -> bool:
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError:
        return False
    try:
        for library in ("nvvm", "nvrtc"):
            load_nvidia_dynamic_lib(library)
    except DynamicLibNotFoundError:
        return False
    return True
