"""Storage formats: how wide an element is in HBM, and how a value stored there is rounded.

NumPy has no bfloat16, so its values sit in float32 arrays, rounded to the 8 bits of significand
they may have; every byte count still uses the true width of 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class DType:
    """A storage format.

    ``width_bytes`` is what an element takes in memory; ``holder`` is the NumPy dtype that carries
    it here; ``eps`` is the spacing of values above 1 (twice the unit roundoff).
    """

    name: str
    width_bytes: int
    holder: str
    eps: float

    @property
    def accumulator(self) -> DType:
        """What arithmetic on this format runs in: float32, or float64 for float64."""
        return FLOAT64 if self.width_bytes == 8 else FLOAT32

    def round(self, x: Array) -> Array:
        """``x`` rounded to nearest, ties to even; ``x`` itself if it has this format's holder."""
        if self is BFLOAT16:
            return round_to_bfloat16(x)
        with np.errstate(over="ignore"):  # past the largest value comes infinity
            return np.asarray(x, dtype=self.holder)


FLOAT16 = DType("float16", 2, "float16", 2.0**-10)
BFLOAT16 = DType("bfloat16", 2, "float32", 2.0**-7)
FLOAT32 = DType("float32", 4, "float32", 2.0**-23)
FLOAT64 = DType("float64", 8, "float64", 2.0**-52)
DTYPES = {t.name: t for t in (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)}


def round_to_bfloat16(x: Array) -> NDArray[np.float32]:
    """Round to bfloat16 (IEEE round-to-nearest-even), returned as float32 values.

    >>> round_to_bfloat16(np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 / 3])).tolist()
    [1.0, 1.015625, 0.333984375]
    """
    x = np.asarray(x)
    with np.errstate(over="ignore"):
        f = x.astype(np.float32)
    bits = f.view(np.uint32).copy()
    if x.dtype.itemsize > 4:
        # Two roundings in a row are not one. Rounding to *odd* first keeps what the second one
        # needs: cut the float64 toward zero and set the last bit if anything was cut off.
        away = np.abs(f.astype(x.dtype)) > np.abs(x)
        bits -= away.astype(np.uint32)
        bits |= ((f.astype(x.dtype) != x) & ~np.isnan(x)).astype(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    rounded = np.where(np.isnan(f), bits >> np.uint32(16) | np.uint32(0x40), rounded)
    return (rounded.astype(np.uint32) << np.uint32(16)).view(np.float32)
