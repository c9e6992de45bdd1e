"""Run a kernel under Numba's CUDA simulator on arrays that count every element read and written.

The simulator hands any argument that is no NumPy array to the kernel untouched, so the kernel's own
source does the counting: nothing is modelled here. Slow (a Python thread per CUDA thread): small
shapes, few threads.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from simattn.counts import Traffic

from ._cuda import SIMULATOR, cuda
from .flash_simt import KERNELS
from .layout import Layout, buffers, round_up
from .problem import Problem

_lock = threading.Lock()


class Counted:
    """Device memory that counts: a flat array whose scalar reads and writes are added up.

    bfloat16 is held as its bits, as on the GPU. An index outside the array, a negative one too, is
    an error: the memory beside a tensor is somebody else's.
    """

    __slots__ = ("_lock", "data", "reads", "size", "writes")

    def __init__(self, array: np.ndarray) -> None:
        flat = array.reshape(-1)  # a view: the kernel writes into ``array``
        self.data = flat.view(np.uint16) if flat.dtype.name == "bfloat16" else flat
        self.size = flat.size
        self.reads = self.writes = 0
        self._lock = threading.Lock()

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(f"read of element {index} of {self.size}")
        with self._lock:
            self.reads += 1
        return self.data[index]

    def __setitem__(self, index, value):
        if not 0 <= index < self.size:
            raise IndexError(f"write of element {index} of {self.size}")
        with self._lock:
            self.writes += 1
        self.data[index] = value


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a kernel computed under the simulator, and what it moved."""

    out: np.ndarray
    lse: np.ndarray | None
    traffic: Traffic


def small_layout(block_q: int, block_k: int, d: int, e: int, ty: int = 2, tx: int = 2) -> Layout:
    """Few threads, each with much to do: what a simulator likes."""
    return Layout(block_q, block_k, round_up(round_up(d, tx), 8), round_up(e, tx), ty, tx)


def simulate(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    variant: str = "q_outer",
    block_q: int = 8,
    block_k: int = 8,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    threads: tuple[int, int] = (2, 2),
) -> Simulated:
    """Attention by the kernel ``variant`` on NumPy arrays ``(..., heads, rows, width)``.

    ``threads`` is (ty, tx) of the layout. Raises RuntimeError if Numba was imported without
    ``NUMBA_ENABLE_CUDASIM=1``.
    """
    problem = Problem.of(
        q.shape, k.shape, v.shape, q.dtype.name,
        is_causal=is_causal, scale=scale, window_size=window_size,
    )  # fmt: skip
    return run(problem, [q, k, v], variant, block_q, block_k, return_lse, threads)


def run(
    problem: Problem,
    inputs: list[np.ndarray],
    variant: str,
    block_q: int,
    block_k: int,
    return_lse: bool,
    threads: tuple[int, int] = (2, 2),
) -> Simulated:
    """The same for a problem that was checked already."""
    if not SIMULATOR:
        raise RuntimeError("counting needs the simulator: set NUMBA_ENABLE_CUDASIM=1 before numba")
    layout = small_layout(
        min(block_q, max(1, problem.n)), min(block_k, max(1, problem.s)),
        problem.d, problem.e, *threads,
    )  # fmt: skip
    q, k, v = (np.ascontiguousarray(x) for x in inputs)
    arrays = {"Q": q, "K": k, "V": v, "O": np.empty(problem.out_shape, q.dtype)}
    statistics = ("L", "m", "l") if variant == "kv_outer" else ("L",)
    arrays |= {name: np.empty(problem.lse_shape, np.float32) for name in statistics}
    counted = {name: Counted(array) for name, array in arrays.items()}
    heads = {"K": problem.kv_heads, "V": problem.kv_heads}
    strides = [_strides(arrays[name], heads.get(name, problem.heads)) for name in "QKVO"]
    grid = problem.programs(variant, layout.block_q)
    if grid:
        kernel = cuda.jit(KERNELS[variant](layout, problem.dtype))
        with _simulation():
            launch = kernel[grid, layout.threads, 0, buffers(variant, layout).bytes]
            launch(*counted.values(), *strides, *problem.scalars(), int(return_lse))
    return Simulated(arrays["O"], arrays["L"] if return_lse else None, _traffic(arrays, counted))


@contextmanager
def _simulation() -> Iterator[None]:
    """One launch at a time, which is the simulator's limit, and settings that suit it.

    NaN and infinity are legitimate in a kernel, and NumPy's scalars warn about them. The simulator
    polls its threads without pause: a short switch interval lets them run, ten times as fast.
    """
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        try:
            yield
        finally:
            sys.setswitchinterval(interval)


def _strides(x: np.ndarray, heads: int) -> tuple[int, int, int]:
    """Strides (batch, head, row) in elements of a contiguous array."""
    rows, width = x.shape[-2:]
    return heads * rows * width, rows * width, width


def _traffic(arrays: dict[str, np.ndarray], counted: dict[str, Counted]) -> Traffic:
    def moved(direction: str, in_bytes: bool) -> dict[str, int]:
        counts = {name: getattr(c, direction) for name, c in counted.items()}
        size = {name: array.itemsize if in_bytes else 1 for name, array in arrays.items()}
        return {name: count * size[name] for name, count in counts.items() if count}

    return Traffic(
        moved("reads", False), moved("writes", False), moved("reads", True), moved("writes", True)
    )
