"""Attention by the tensor-core kernels on NumPy arrays, under the emulator: values and counts.

What `counting` is for the portable kernels: the kernel's own source does the counting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simattn.counts import Traffic

from . import mma_layout
from .emulator import Placed, Report, TensorMap, emulate
from .emulator.launch import MOST_SHARED
from .flash_mma import flash_mma
from .flash_sm90 import flash_sm90
from .mma_layout import MmaLayout
from .plans import usual_layout
from .problem import DTYPES, TENSOR_CORES, Problem, shown
from .sm90_layout import (
    GROUP_ROWS,
    MOST_KEYS,
    REGISTERS,
    WARP_ROWS,
    Sm90Layout,
    can_sit_out,
)
from .sm90_schedule import work

TENSORS = ("Q", "K", "V", "O", "L")
MAPS = ("Q_map", "K_map", "V_map", "O_map", "schedule", "length")  # sm90's, before the others
ROWS = (16, 32, 64, 128, 256)  # of a tile of mma: threads copy equal shares


@dataclass(frozen=True, slots=True)
class Emulated:
    """What the kernel computed and moved, and the emulator's report of it."""

    out: np.ndarray
    lse: np.ndarray | None
    traffic: Traffic
    report: Report


def layout_with(
    variant: str, problem: Problem, *, block_q: int | None = None, block_k: int | None = None
) -> MmaLayout | Sm90Layout:
    """A GPU's layout for this problem, with other tiles if they are given.

    >>> problem = Problem.of((40, 64), (40, 64), (40, 64), "float16")
    >>> layout = layout_with("mma", problem, block_q=32)
    >>> layout.block_q, layout.block_k
    (32, 64)
    >>> layout_with("sm90", problem, block_q=64, block_k=48).groups
    1
    """
    if variant not in TENSOR_CORES:
        raise ValueError(f"variant: {shown(variant)} must be one of {', '.join(TENSOR_CORES)}")
    if not mma_layout.takes(problem.d, problem.e):
        raise ValueError(f"d, dv: {problem.d} and {problem.e} must be multiples of 8, at most 256")
    if variant == "sm90" and DTYPES[problem.dtype] != 2:
        raise ValueError(f"dtype: {problem.dtype} must be float16 or bfloat16 for sm90")
    layout = usual_layout(variant, problem)
    if isinstance(layout, MmaLayout):
        enough = [rows for rows in ROWS if 2 * rows >= layout.Q_swizzle.chunks]  # 2: threads a row
        _check_block("block_q", block_q, enough)
        _check_block("block_k", block_k, ROWS)
        if block_q is not None:
            layout = replace(layout, warps=block_q // 16, row_tiles=1)
        return _fitting(replace(layout, block_k=block_k or layout.block_k))
    _check_block("block_q", block_q, [GROUP_ROWS * groups for groups in REGISTERS])
    _check_block("block_k", block_k, range(16, MOST_KEYS + 1, 16))
    if block_q is not None:
        groups = block_q // GROUP_ROWS
        sits_out = layout.sits_out and can_sit_out(groups, layout.stages)
        layout = replace(layout, groups=groups, sits_out=sits_out)
    Bc = block_k or layout.block_k
    return _fitting(replace(layout, block_k=Bc, early=min(layout.early, Bc // 8)))


def attention(
    q: np.ndarray | Placed,
    k: np.ndarray | Placed,
    v: np.ndarray | Placed,
    *,
    variant: str = "mma",
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    out: np.ndarray | None = None,
    layout: MmaLayout | Sm90Layout | None = None,
    kernel: Any = None,
    blocks: int = 2,
    table: np.ndarray | None = None,
    copies: str = "late",
    backwards: bool = False,
) -> Emulated:
    """Run ``flash_mma`` or ``flash_sm90`` on arrays (..., heads, rows, width).

    ``layout`` sets the tiles, by default those of a GPU, and thereby the variant; ``kernel`` is the
    kernel itself, else what ``flash_mma(layout, dtype)`` or ``flash_sm90(layout, dtype)`` makes.
    Of sm90 alone are ``blocks``, how many stay, and ``table``, their work, else `schedule`'s. The
    others are `flash_attention`'s and `emulate`'s.
    """
    arrays = [x.array if isinstance(x, Placed) else x for x in (q, k, v)]
    problem = Problem.of(
        *(x.shape for x in arrays), arrays[0].dtype.name,
        is_causal=is_causal, scale=scale, window_size=window_size,
    )  # fmt: skip
    layout = layout or layout_with(variant, problem)
    if out is None:
        out = np.empty(problem.out_shape, arrays[0].dtype)
    lse = np.empty(problem.lse_shape, np.float32) if return_lse else None
    if isinstance(layout, MmaLayout):
        kernel = kernel or flash_mma(layout, problem.dtype)
        grid, first, tensors = problem.programs("q_outer", layout.block_q), [], [q, k, v, out]
    else:
        kernel = kernel or flash_sm90(layout, problem.dtype)
        tensors = [_four_axes(x) for x in (q, k, v, out)]
        table = work(problem, layout, blocks) if table is None else table
        grid = len(table)
        boxes = (layout.block_q, layout.block_k, layout.block_k, WARP_ROWS)
        maps = [_map(x, rows) for x, rows in zip(tensors, boxes, strict=True)] if grid else []
        first = [*maps, table, table.shape[1]]
    report = Report()
    if grid:
        strides = [_strides(x) for x in tensors]
        report = emulate(
            kernel, grid, layout.threads,
            [*first, *tensors, lse, *strides, *problem.scalars(), int(return_lse)],
            shared_bytes=layout.shared_bytes,
            names=MAPS[: len(first)] + TENSORS + ("",) * 20, copies=copies, backwards=backwards,
        )  # fmt: skip
    report.tensors.pop("schedule", None)
    sizes = {"L": 4} | dict.fromkeys("QKVO", DTYPES[problem.dtype])
    return Emulated(out, lse, _traffic(report, sizes), report)


def _check_block(name: str, block: int | None, known: Any) -> None:
    if block is not None and block not in known:
        raise ValueError(f"{name}: {block} must be one of {', '.join(map(str, known))}")


def _fitting(layout: Any) -> Any:
    if layout.shared_bytes > MOST_SHARED:
        raise ValueError(
            f"block_q, block_k: {layout.block_q} x {layout.block_k} take {layout.shared_bytes} "
            f"bytes of shared memory, more than {MOST_SHARED}"
        )
    return layout


def _four_axes(x: np.ndarray | Placed) -> np.ndarray | Placed:
    """The same tensor as [batch, heads, rows, width]; leading dimensions must merge into one."""
    array = x.array if isinstance(x, Placed) else x
    lead = (1,) * (4 - array.ndim)
    merged = array.reshape((math.prod(array.shape[:-3]), *(lead + array.shape)[-3:]))
    if array.size and not np.shares_memory(merged, array):
        raise ValueError(f"leading dimensions of {array.shape} do not merge into one")
    return Placed(merged, (0,) * len(lead) + x.strides) if isinstance(x, Placed) else merged


def _map(x: np.ndarray | Placed, rows: int) -> TensorMap:
    """Without a row there is nothing to read, but a map needs one."""
    array = x.array if isinstance(x, Placed) else x
    return TensorMap(x if array.shape[-2] else np.zeros((1, 1, 1, 8), array.dtype), rows)


def _strides(x: np.ndarray | Placed) -> tuple[int, int, int]:
    """Strides (batch, head, row) in elements; leading dimensions must merge into one."""
    if isinstance(x, Placed):
        strides = x.strides
    else:
        strides = tuple(stride // x.itemsize for stride in x.strides)
    *lead, row, _ = strides
    batch, head = ([0, 0, *lead])[-2:]
    return batch, head, row


def _traffic(report: Report, sizes: dict[str, int]) -> Traffic:
    reads = {name: x.read_bytes for name, x in report.tensors.items() if x.read_bytes}
    writes = {name: x.write_bytes for name, x in report.tensors.items() if x.write_bytes}
    return Traffic(
        {name: count // sizes[name] for name, count in reads.items()},
        {name: count // sizes[name] for name, count in writes.items()},
        reads,
        writes,
    )
