"""Tiled attention as Numba CUDA kernels: the recurrence and tiles of ``simattn``, on a GPU.

Importing this needs neither numba nor a GPU: ``flash_attention`` fetches them when it is called.
Read ``flash_simt.py`` for the kernels, ``tiles.py`` for the words they are written in.
"""

from .launch import flash_attention

__all__ = ["flash_attention"]

# How to tell this package from the one of the same name that the PyPI project "kernels" installs.
DISTRIBUTION = "simattn"
