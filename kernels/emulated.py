"""Attention by the tensor-core kernel on NumPy arrays, under the emulator: values and counts.

What `counting` is for the portable kernels: the kernel's own source does the counting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simattn.counts import Traffic

from .emulator import Placed, Report, emulate
from .flash_mma import flash_mma
from .mma_layout import MmaLayout, layout_for
from .problem import DTYPES, Problem

TENSORS = ("Q", "K", "V", "O", "L")


@dataclass(frozen=True, slots=True)
class Emulated:
    """What the kernel computed and moved, and the emulator's report of it."""

    out: np.ndarray
    lse: np.ndarray | None
    traffic: Traffic
    report: Report


def attention(
    q: np.ndarray | Placed,
    k: np.ndarray | Placed,
    v: np.ndarray | Placed,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    out: np.ndarray | None = None,
    layout: MmaLayout | None = None,
    kernel=None,
    copies: str = "late",
    backwards: bool = False,
) -> Emulated:
    """Run ``flash_mma`` on arrays (..., heads, rows, width) of float16, bfloat16 or float32.

    ``layout`` sets the tiles, by default those of a GPU; ``kernel`` is the kernel itself, else
    ``flash_mma(layout, dtype)``. The others are `flash_attention`'s and `emulate`'s.
    """
    arrays = [x.array if isinstance(x, Placed) else x for x in (q, k, v)]
    problem = Problem.of(
        *(x.shape for x in arrays), arrays[0].dtype.name,
        is_causal=is_causal, scale=scale, window_size=window_size,
    )  # fmt: skip
    itemsize = DTYPES[problem.dtype]
    layout = layout or layout_for(problem.d, problem.e, is_causal=is_causal, itemsize=itemsize)
    if out is None:
        out = np.empty(problem.out_shape, arrays[0].dtype)
    lse = np.empty(problem.lse_shape, np.float32) if return_lse else None
    tensors = [q, k, v, out, lse]
    strides = [_strides(x) for x in (q, k, v, out)]
    report = Report()
    if grid := problem.programs("q_outer", layout.block_q):
        report = emulate(
            kernel or flash_mma(layout, problem.dtype), grid, layout.threads,
            [*tensors, *strides, *problem.scalars(), int(return_lse)],
            shared_bytes=layout.shared_bytes, names=TENSORS + ("",) * 20, copies=copies,
            backwards=backwards,
        )  # fmt: skip
    sizes = {"L": 4} | dict.fromkeys("QKVO", itemsize)
    return Emulated(out, lse, _traffic(report, sizes), report)


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
