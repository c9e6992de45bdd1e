"""Boxes of tensor maps: which bytes of a tensor, and where they lie in shared memory.

A box is rows of 128 bytes. In shared memory its 16-byte chunks are swizzled; of the tensor it holds
what lies inside, and zeros for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .memory import SHARED_BASE, Mapped

ROW_BYTES, SWIZZLED_BYTES = 128, 1024


@dataclass(frozen=True, slots=True)
class Box:
    """One box: its bytes' places [rows, 128] in shared memory, and the part inside the tensor."""

    places: np.ndarray
    inside: tuple[slice, slice]  # of the places
    address: np.ndarray  # of each inside row's first byte
    width: int  # bytes of an inside row


def box_of(mapped: Mapped, corner: list[int], start: int) -> Box:
    """The box whose first element is ``corner`` (column, row, head, batch), at a shared address."""
    x, y, *lead = corner
    size, (n, columns) = mapped.itemsize, mapped.shape[-2:]
    lengths, strides = mapped.shape[-3::-1], mapped.strides[-3::-1]  # head, batch
    exists = all(0 <= i < length for i, length in zip(lead, lengths, strict=True))
    top, bottom = max(0, y), min(n, y + mapped.rows)
    left, right = max(0, x), min(columns, x + ROW_BYTES // size)
    if not exists or top >= bottom or left >= right:
        top, bottom, left, right = y, y, x, x
    first = mapped.address + sum(i * stride for i, stride in zip(lead, strides, strict=True))
    rows = np.arange(top, bottom, dtype=np.int64)
    at = start + np.arange(mapped.rows * ROW_BYTES).reshape(mapped.rows, ROW_BYTES)
    return Box(
        swizzled(at) - SHARED_BASE,
        (slice(top - y, bottom - y), slice((left - x) * size, (right - x) * size)),
        first + rows * mapped.strides[-2] + left * size,
        (right - left) * size,
    )


def swizzled(address: np.ndarray) -> np.ndarray:
    """128-byte swizzle: the chunk's number in its row, changed by the row's modulo 8.

    >>> swizzled(np.array([0, 128, 144, 1024]))
    array([   0,  144,  128, 1024])
    """
    return address ^ ((address >> 7 & 7) << 4)
