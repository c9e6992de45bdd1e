"""Checks at the public edge: an argument becomes what the code behind it expects, or an error.

An error is one line that names the argument, its value and the rule.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from simattn.dtypes import DTYPES, Array, DType


def array(name: str, x: ArrayLike) -> Array:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name}: masked arrays are not taken")
    try:
        array = np.asarray(x)
    except ValueError:
        raise ValueError(f"{name}: must be an array, its rows equally long") from None
    if array.dtype.name not in DTYPES:
        raise TypeError(f"{name} has dtype {array.dtype.name}: must be one of {', '.join(DTYPES)}")
    return array


def storage_of(given: dict[str, Array], dtype: str | None) -> DType:
    """The storage format: the one asked for, or the one that all inputs have."""
    if dtype is not None:
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if len({x.dtype.name for x in given.values()}) > 1:
        kinds = ", ".join(f"{name} {x.dtype.name}" for name, x in given.items())
        raise TypeError(f"{kinds}: must have one dtype")
    return DTYPES[next(iter(given.values())).dtype.name]


def stored(x: Array, storage: DType) -> Array:
    return storage.round(x.astype(np.float32) if x.dtype.name == "bfloat16" else x)


def with_heads(Q: Array, K: Array, V: Array) -> tuple[Array, Array, Array]:
    """The arrays with their heads axis, once their shapes are known to fit each other."""
    shapes = f"q {Q.shape}, k {K.shape}, v {V.shape}"
    if not Q.ndim == K.ndim == V.ndim or Q.ndim < 2:
        raise ValueError(f"{shapes}: must have equally many dimensions, at least 2")
    if Q.ndim == 2:
        Q, K, V = Q[None], K[None], V[None]
    if not Q.shape[:-3] == K.shape[:-3] == V.shape[:-3]:
        raise ValueError(f"{shapes}: batch dimensions must be equal")
    if K.shape[-3:-1] != V.shape[-3:-1]:
        raise ValueError(f"{shapes}: k and v must have the same heads and rows")
    if Q.shape[-1] != K.shape[-1] or not Q.shape[-1] or not V.shape[-1]:
        raise ValueError(f"{shapes}: q and k must have the same width, and no width may be 0")
    heads, kv_heads = Q.shape[-3], K.shape[-3]
    if (heads % kv_heads) if kv_heads else heads:
        raise ValueError(f"{shapes}: the {kv_heads} heads of k must divide the {heads} of q")
    return Q, K, V


def whole(name: str, value: Any, least: int = 1) -> int:
    """A Python integer, whatever kind of integer it was: NumPy's would overflow."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} {value!r}: must be a whole number, at least {least}")
    return int(value)


def optional_whole(name: str, value: Any) -> int | None:
    return None if value is None else whole(name, value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} {value!r}: must be True or False")
    return bool(value)


def finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ValueError(f"{name} {value!r}: must be a finite number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} {value!r}: must be a finite number")
    return number


def window(window_size: Any) -> tuple[int, int]:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size {window_size!r}: must be two whole numbers") from None
    for side in (left, right):
        if isinstance(side, bool) or not isinstance(side, (int, np.integer)) or side < -1:
            raise ValueError(
                f"window_size {window_size!r}: must be two whole numbers, each at least -1"
            )
    return int(left), int(right)
