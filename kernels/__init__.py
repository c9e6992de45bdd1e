"""Tiled attention as Numba CUDA kernels: the recurrence and tiles of ``simattn``, on a GPU.

Importing this needs neither numba nor a GPU: ``flash_attention`` fetches them when it is called.
Read ``flash_simt.py`` for the kernels, ``tiles.py`` for the words they are written in, then
``flash_mma.py`` for tensor cores and ``flash_sm90.py`` for Hopper's. ``emulate`` runs those on a
CPU: EMULATOR.md.
"""

from typing import Any

from .launch import flash_attention, prepare

__all__ = ["emulate", "flash_attention", "prepare"]

# How to tell this package from the one of the same name that the PyPI project "kernels" installs.
DISTRIBUTION = "simattn"


def __getattr__(name: str) -> Any:
    """``emulate``, fetched when it is asked for: it brings Numba along, where that is installed."""
    if name == "emulate":
        from .emulator import emulate

        return emulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
