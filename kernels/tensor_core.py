"""How tensor cores add: one instruction's sum of products, to the bit.

The products of an instruction are exact. They and C are shifted to the largest exponent among them
and cut there to float32's 24 bits and ``guard`` more, added, and the sum is cut to 24 bits: all of
it toward zero. Sums of many terms go through ``terms`` at a time.

Source: Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004); before
them Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores" (2021).

The references in `ptx.py` add in float32, which is quicker. `truncated` makes them add like this::

    with truncated(HOPPER):
        emulate(kernel, ...)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

SMALLEST = -133  # the least exponent that terms are shifted to


@dataclass(frozen=True, slots=True)
class TensorCore:
    """A chip's."""

    terms_16: int  # products added at once, of float16 or bfloat16
    terms_tf32: int
    guard: int  # bits beyond float32's 24 that a shifted term keeps


AMPERE = TensorCore(8, 4, 1)  # A100
HOPPER = TensorCore(16, 8, 2)  # H100, H200
_now: TensorCore | None = None


@contextlib.contextmanager
def truncated(core: TensorCore = HOPPER) -> Iterator[None]:
    """Within it `ptx.py`'s mma add as ``core`` does, in all threads."""
    global _now
    before, _now = _now, core
    try:
        yield
    finally:
        _now = before


def multiply_add(A: np.ndarray, B: np.ndarray, C: np.ndarray) -> np.ndarray:
    """A B + C as one instruction does it: A [m, k], B [k, n] of 16-bit values or TF32, C [m, n]."""
    if _now is None or not all(np.isfinite(x).all() for x in (A, B, C)):
        return np.asarray(A @ B + C)
    terms = _now.terms_tf32 if A.shape[1] == 8 else _now.terms_16
    for k in range(0, A.shape[1], terms):
        C = add_products(A[:, k : k + terms], B[k : k + terms], C, _now.guard)
    return C


def add_products(A: np.ndarray, B: np.ndarray, C: np.ndarray, guard: int) -> np.ndarray:
    """A B + C, float32 [m, n], all products and C aligned once.

    >>> one, tiny = np.ones((1, 1), np.float32), np.full((1, 1), 2.0**-24, np.float32)
    >>> three = np.hstack([tiny, tiny, tiny])  # 1 + 3 / 2**24 is nearest 1 + 2 / 2**23
    >>> (add_products(three, np.ones((3, 1), np.float32), one, 1) - 1).item() * 2**23
    1.0
    """
    A, B, C = (x.astype(np.float64) for x in (A, B, C))
    exponents = _exponent(A.T)[:, :, None] + _exponent(B)[:, None, :]  # [k, m, n]
    top = np.maximum(exponents.max(axis=0), _exponent(C))
    last = np.maximum(top, SMALLEST) - (23 + guard)  # [m, n], the exponent of the last bit kept
    finer, unit = np.ldexp(1.0, -last), np.ldexp(1.0, last)
    terms = np.trunc(A.T[:, :, None] * B[:, None, :] * finer).sum(axis=0) + np.trunc(C * finer)
    mantissa, exponent = np.frexp(terms * unit)
    with np.errstate(over="ignore", under="ignore"):
        sums = np.ldexp(np.trunc(mantissa * 2**24), exponent - 24)
        return np.asarray(sums, np.float32)


def _exponent(x: np.ndarray) -> np.ndarray:
    """That of the leading bit; a product's is its factors' sum, though it may carry one more."""
    return np.where(x == 0, -(1 << 20), np.frexp(x)[1] - 1)
