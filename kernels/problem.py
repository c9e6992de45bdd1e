"""One attention problem, validated: shapes, mask and scale, and what a kernel is told about them.

Plain integers, no arrays and no CUDA. Every rule that an argument can break is here or in
``tensors.py``, and each error names the argument, its value and the rule.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .layout import MAX_WIDTH

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4}  # bytes an element
VARIANTS = ("q_outer", "kv_outer")  # the portable kernels
TENSOR_CORES = ("sm90", "mma")  # the fastest first
ALL_VARIANTS = (*VARIANTS, *TENSOR_CORES)
NO_WINDOW = (-1, -1)  # keys before and after that a query sees: all
MAX_PROGRAMS = 2**31 - 1  # a grid's first dimension


@dataclass(frozen=True, slots=True)
class Problem:
    """Shapes in rows and columns; ``left`` and ``right`` are how far a row sees, in keys."""

    lead: tuple[int, ...]  # dimensions before heads
    heads: int
    kv_heads: int
    n: int
    s: int
    d: int
    e: int
    dtype: str
    left: int
    right: int
    scale: float
    ndim: int

    @classmethod
    def of(
        cls,
        q: tuple[int, ...],
        k: tuple[int, ...],
        v: tuple[int, ...],
        dtype: str,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Problem:
        """Check three shapes and the options.

        >>> p = Problem.of((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8), "float32", is_causal=True)
        >>> p.n, p.s, p.heads, p.kv_heads, p.right
        (5, 7, 4, 1, 0)
        """
        if dtype not in DTYPES:
            raise TypeError(f"q: dtype {dtype} is not taken; the kernels take {', '.join(DTYPES)}")
        for name, shape in (("q", q), ("k", k), ("v", v)):
            if len(shape) < 2:
                raise ValueError(f"{name}: shape {shape} needs at least (rows, width)")
            if len(shape) != len(q):
                raise ValueError(f"{name}: shape {shape} must have as many dimensions as q, {q}")
            if not 1 <= shape[-1] <= MAX_WIDTH:
                raise ValueError(f"{name}: width {shape[-1]} must be 1 to {MAX_WIDTH}")
            if shape[:-3] != q[:-3]:
                raise ValueError(f"{name}: leading dimensions {shape[:-3]} must be q's, {q[:-3]}")
        if k[-1] != q[-1]:
            raise ValueError(f"k: width {k[-1]} must match q's width {q[-1]}")
        if v[:-1] != k[:-1]:
            raise ValueError(f"v: shape {v} must match k's in all but the width, {k}")
        heads, kv_heads = (shape[-3] if len(shape) > 2 else 1 for shape in (q, k))
        if heads and (kv_heads == 0 or heads % kv_heads):
            raise ValueError(f"k: {kv_heads} heads must divide q's {heads} heads")
        n, s = q[-2], k[-2]
        left, right = _window(window_size, n + s)
        return cls(
            lead=tuple(q[:-3]), heads=heads, kv_heads=max(1, kv_heads), n=n, s=s, d=q[-1], e=v[-1],
            dtype=dtype, left=left, right=0 if check_flag("is_causal", is_causal) else right,
            scale=_scale(scale, q[-1]), ndim=len(q),
        )  # fmt: skip

    @property
    def batch(self) -> int:
        return math.prod(self.lead)

    @property
    def out_shape(self) -> tuple[int, ...]:
        heads = (self.heads,) if self.ndim > 2 else ()
        return (*self.lead, *heads, self.n, self.e)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return self.out_shape[:-1]

    def programs(self, variant: str, block_q: int) -> int:
        """Blocks of the grid: a row tile each, or a whole head each. 0: nothing to compute."""
        per_head = -(-self.n // block_q) if variant == "q_outer" else min(1, self.n)
        programs = self.batch * self.heads * per_head
        if programs > MAX_PROGRAMS:
            raise ValueError(f"q: {programs} blocks are more than a grid's {MAX_PROGRAMS}")
        return programs

    def scalars(self) -> tuple[int | np.float32, ...]:
        """A kernel's arguments between the strides and ``want_L``."""
        return (
            self.n, self.s, self.d, self.e, self.heads, max(1, self.heads // self.kv_heads),
            self.left, self.right, np.float32(self.scale),
        )  # fmt: skip


def check_variant(variant: str) -> str:
    known = isinstance(variant, str) and variant in ALL_VARIANTS
    if not known:
        error = ValueError if isinstance(variant, str) else TypeError
        raise error(f"variant: {shown(variant)} must be one of {', '.join(ALL_VARIANTS)}")
    return variant


def check_block(name: str, block: int | None) -> int | None:
    """A tile size: a whole number >= 1, or None."""
    if block is None:
        return None
    size = _whole(name, block)
    if size < 1:
        raise ValueError(f"{name}: {shown(size)} must be at least 1")
    if size > MAX_PROGRAMS:
        raise ValueError(f"{name}: {shown(size)} must be at most {MAX_PROGRAMS}")
    return size


def check_softcap(softcap: float) -> None:
    if _real("softcap", softcap) != 0.0:
        raise NotImplementedError(
            f"softcap: {shown(softcap)} must be 0, the kernels have no softcap yet"
        )


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: {shown(value)} must be True or False")
    return bool(value)


def shown(value: object) -> str:
    """A value as an error message shows it: in one line, and not a long one."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of more than 4300 digits"
    return text if len(text) <= 80 else f"{text[:70]}... ({len(text)} characters)"


def numpy_dtype(name: str, dtype: str) -> np.dtype:
    """The NumPy dtype of a storage type, for the argument ``name``; bfloat16 is ml_dtypes'."""
    if dtype != "bfloat16":
        return np.dtype(dtype)
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(
            f"{name}: bfloat16 needs ml_dtypes in NumPy: pip install ml_dtypes"
        ) from None
    return np.dtype(ml_dtypes.bfloat16)


def _whole(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: {shown(value)} must be a whole number") from None


def _real(name: str, value: object) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}: {shown(value)} must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _window(window_size: tuple[int, int], unlimited: int) -> tuple[int, int]:
    is_pair = isinstance(window_size, Sequence) and not isinstance(window_size, str | bytes)
    if not is_pair or len(window_size) != 2:
        raise ValueError(f"window_size: {shown(window_size)} must be (left, right)")
    sides = []
    for side in window_size:
        keys = _whole("window_size", side)
        if keys < -1:
            raise ValueError(f"window_size: {shown(window_size)} must not go below -1, unlimited")
        sides.append(unlimited if keys == -1 else min(keys, unlimited))
    return sides[0], sides[1]


def _scale(scale: float | None, d: int) -> float:
    if scale is None:
        return 1 / math.sqrt(d)
    value = _real("scale", scale)
    if not abs(value) * math.log2(math.e) <= float(np.finfo(np.float32).max):
        raise ValueError(
            f"scale: {shown(scale)} must be finite in float32, the kernels' arithmetic, "
            "and so must log2(e) times it"
        )
    return value
