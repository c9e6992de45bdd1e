"""``python -m kernels check``: both loop orders against float64 on this machine's GPU.

The error allowed is twice that of plain NumPy attention in float32 against the same float64 oracle,
plus one rounding to storage for each time that O is stored. Outputs start as NaN, so that an
element that is never written fails.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from simattn import exact

from .launch import flash_attention
from .plans import tiles
from .problem import NO_WINDOW, numpy_dtype

T = TypeVar("T")

HANGS_AFTER_S = 300
EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True, slots=True)
class Case:
    """One problem; ``s``, ``e`` None: as n, d."""

    variant: str
    n: int
    d: int
    s: int | None = None
    e: int | None = None
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    dtype: str = "float32"
    is_causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    block_q: int | None = None
    block_k: int | None = None

    def __str__(self) -> str:
        mask = mask_name(self.is_causal, self.window_size)
        blocks = f" tiles {self.block_q}x{self.block_k}" if self.block_q else ""
        return (
            f"{self.variant:<8} {self.dtype:<8} {self.batch}x{self.heads}/{self.kv_heads} heads "
            f"{self.n} x {self.s or self.n}, d {self.d}, e {self.e or self.d}, {mask}{blocks}"
        )


def mask_name(is_causal: bool, window_size: tuple[int, int]) -> str:
    """``causal window 100,0``, as a line of the report says it."""
    window = "" if window_size == NO_WINDOW else " window {},{}".format(*window_size)
    return ("causal" if is_causal else "full") + window


@dataclass(frozen=True, slots=True)
class Outcome:
    """Largest errors of O and L, and what they may be."""

    out_error: float
    out_allowed: float
    lse_error: float
    lse_allowed: float

    @property
    def passed(self) -> bool:
        return self.out_error <= self.out_allowed and self.lse_error <= self.lse_allowed


def cases(small: bool = False) -> Iterator[Case]:
    """The grid, each axis varied around a ragged middle. ``small``: what a sanitizer bears."""
    variants = ("q_outer", "kv_outer")
    if small:
        for variant, dtype in itertools.product(variants, EPS):
            yield Case(variant, 70, 40, s=150, e=24, kv_heads=1, dtype=dtype, is_causal=True)
        for variant in variants:
            yield Case(variant, 130, 64)
            yield Case(variant, 65, 128, s=129, is_causal=True)
            yield Case(variant, 100, 16, window_size=(20, 3), block_q=24, block_k=20)
        return
    for variant in variants:
        for d in (16, 24, 32, 64, 80, 96, 128, 192, 256):
            yield Case(variant, 333, d, is_causal=d % 32 == 0)
        for d, dtype in itertools.product((40, 64, 128, 256), ("float16", "bfloat16")):
            yield Case(variant, 333, d, dtype=dtype, is_causal=d == 64)
        for n, s in ((1, 1), (1, 777), (64, 64), (65, 63), (517, 200), (200, 517), (1024, 1024)):
            for is_causal in (False, True):
                yield Case(variant, n, 64, s=s, is_causal=is_causal)
        for d, e in ((64, 128), (192, 128), (40, 7), (1, 1), (256, 3)):
            yield Case(variant, 150, d, e=e, s=170)
        for heads, kv_heads in ((8, 1), (6, 3), (5, 5)):
            yield Case(variant, 130, 64, batch=3, heads=heads, kv_heads=kv_heads, is_causal=True)
        for window in ((0, 0), (100, 0), (-1, 5), (7, -1), (64, 64), (1000, 1000)):
            yield Case(variant, 300, 64, s=350, window_size=window)
        for block_q, block_k in ((1, 1), (16, 128), (37, 53)):
            yield Case(variant, 260, 64, block_q=block_q, block_k=block_k, is_causal=True)


def examine(case: Case, seed: int = 0) -> Outcome:
    """Run a case on the GPU and compare it with float64."""
    q, k, v = inputs(case, seed)
    mask = {"is_causal": case.is_causal, "window_size": case.window_size}
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    options = {"variant": case.variant, "block_q": case.block_q, "block_k": case.block_k}
    out, lse = poisoned(q, k, v, out, **mask, **options)
    layout = tiles(0, case.variant, case.d, v.shape[-1], case.block_q, case.block_k)
    return compare(case, (q, k, v), out, lse, layout.block_k)


def inputs(case: Case, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random normal q, k, v of a case."""
    rng = np.random.default_rng(seed)
    s, e = case.s or case.n, case.e or case.d
    shapes = (
        (case.batch, case.heads, case.n, case.d),
        (case.batch, case.kv_heads, s, case.d),
        (case.batch, case.kv_heads, s, e),
    )
    q, k, v = (
        rng.standard_normal(shape).astype(numpy_dtype("dtype", case.dtype)) for shape in shapes
    )
    return q, k, v


def poisoned(q, k, v, out, **options):
    """Attention into memory that holds NaN, on the GPU too."""
    if q.dtype.name == "bfloat16":  # Numba's arrays have no such type: NumPy's go there and back
        return flash_attention(q, k, v, out=out, return_lse=True, **options)
    from ._cuda import cuda

    arrays = [cuda.to_device(x) for x in (q, k, v)]
    target = cuda.to_device(out)
    _, lse = flash_attention(*arrays, out=target, return_lse=True, **options)
    return target.copy_to_host(), lse.copy_to_host()


def compare(
    case: Case, qkv: tuple[np.ndarray, ...], out: np.ndarray, lse: np.ndarray, block_k: int
) -> Outcome:
    """Errors against float64, and the errors of plain float32 that allow them.

    ``block_k`` is the launch's: ``kv_outer`` stores O once a K tile.
    """
    mask = {"is_causal": case.is_causal, "window_size": case.window_size}
    q, k, v = (np.asarray(x, np.float64) for x in qkv)
    right, right_lse = exact.attention(q, k, v, **mask)
    other, other_lse = plain(*(x.astype(np.float32) for x in (q, k, v)), right_lse, **mask)
    visits = -(-k.shape[-2] // block_k) if case.variant == "kv_outer" else 1
    rounding = EPS[case.dtype] / 2 * np.abs(right).max(initial=0)
    blind = np.isneginf(right_lse)
    if not np.array_equal(np.isneginf(lse), blind):
        return Outcome(np.inf, 0.0, np.inf, 0.0)
    largest_lse = np.abs(right_lse[~blind]).max(initial=1)
    return Outcome(
        _largest(out, right),
        2 * _largest(other, right) + visits * rounding + np.finfo(np.float32).eps,
        _largest(lse[~blind], right_lse[~blind]),
        2 * _largest(other_lse[~blind], right_lse[~blind]) + EPS["float32"] * largest_lse,
    )


def plain(q, k, v, lse, *, is_causal, window_size):
    """Attention in NumPy's float32, untiled; ``lse`` only tells which rows see a key."""
    group = q.shape[-3] // k.shape[-3]
    k, v = (np.repeat(x, group, axis=-3) for x in (k, v))
    n, s = q.shape[-2], k.shape[-2]
    ahead = np.arange(s) - (np.arange(n)[:, None] + s - n)
    left, right = window_size
    hidden = ahead > (0 if is_causal else n + s if right == -1 else right)
    hidden |= -ahead > (n + s if left == -1 else left)
    S = q @ np.swapaxes(k, -1, -2) * np.float32(1 / np.sqrt(q.shape[-1]))
    S = np.where(hidden, -np.inf, S)
    m = np.where(np.isneginf(lse), 0, S.max(axis=-1))[..., None]
    P = np.exp(S - m)
    l = np.where(np.isneginf(lse), 1, P.sum(axis=-1))[..., None]
    return P @ v / l, (m + np.log(l))[..., 0]


def main(small: bool = False) -> int:
    """`report` of the grid."""
    chosen = [case for case in cases(small) if case.dtype != "bfloat16" or _has_bfloat16()]
    if not small:
        compile_for(chosen)
    return report(chosen, examine)


def report(cases: Sequence[T], examine: Callable[[T], Outcome]) -> int:
    """A line per case; 1 if one fails. A case that hangs ends the process."""
    failed = 0
    for case in cases:
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        outcome = examine(case)
        failed += not outcome.passed
        print(
            f"{'ok  ' if outcome.passed else 'FAIL'} {case}: "
            f"O {outcome.out_error:.1e} of {outcome.out_allowed:.1e}, "
            f"L {outcome.lse_error:.1e} of {outcome.lse_allowed:.1e}",
            flush=True,
        )
    faulthandler.cancel_dump_traceback_later()
    print(f"{len(cases) - failed} of {len(cases)} cases agree with float64")
    return 1 if failed else 0


def compile_for(cases: Iterable[Case]) -> None:
    """Compile the cases' kernels for device 0, several at a time."""
    from .compiled import Kernel, compile_all

    compile_all(
        Kernel(
            case.variant,
            tiles(0, case.variant, case.d, case.e or case.d, case.block_q, case.block_k),
            case.dtype,
        )
        for case in cases
    )


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference; NaN counts as infinite."""
    difference = np.abs(np.asarray(a, np.float64) - b)
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0))


def _has_bfloat16() -> bool:
    return importlib.util.find_spec("ml_dtypes") is not None
