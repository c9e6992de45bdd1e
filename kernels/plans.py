"""Which kernel, which tiles, which arguments: what is the same in all launches of a problem."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import driver, mma_layout
from .compiled import Kernel
from .layout import Layout, choose
from .problem import DTYPES, TENSOR_CORES, VARIANTS, Problem
from .tensors import Tensor

ALIGNMENT = 16  # bytes that a copy of the tensor-core kernels moves


@dataclass(frozen=True, slots=True)
class Plan:
    """A problem's launch, but for the addresses."""

    problem: Problem
    kernel: Kernel
    device: int
    grid: int
    statistics: tuple[str, ...]  # what the kernel keeps in global memory: L on request; m and l
    pack: Callable[[Sequence[int]], bytes]  # addresses of q, k, v, out and the statistics


def plan(
    problem: Problem,
    views: Sequence[Tensor],
    *,
    return_lse: bool,
    variant: str | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
    layout: Any = None,
) -> Plan:
    """Choose for ``views``, which are q, k, v and out; see `flash_attention` for the options.

    ``layout`` sets a tensor-core kernel's tiles. Raises ValueError if the problem is not for the
    kernel asked for.
    """
    if variant not in (None, *VARIANTS) and (block_q, block_k) != (None, None):
        raise ValueError(f"block_q, block_k: are for {' and '.join(VARIANTS)}, not {variant!r}")
    device = views[0].device or 0
    capability = driver.limits(device).capability
    if variant is None:
        of_simt = block_q is not None or block_k is not None
        variant = "q_outer" if of_simt else chosen(problem, views, capability)
    strides = [number for x in views for number in x.kernel_strides()]
    rest = (*strides, *problem.scalars(), int(return_lse))
    if variant in VARIANTS:
        layout = tiles(device, variant, problem.d, problem.e, block_q, block_k)
        grid = problem.programs(variant, layout.block_q)
    else:
        if refused := refusal(variant, problem, views, capability):
            raise ValueError(f"variant: {variant!r} is not for this problem: {refused}")
        layout = layout or mma_layout.layout_for(
            problem.d, problem.e, is_causal=problem.right == 0, itemsize=DTYPES[problem.dtype],
            capability=capability,
        )  # fmt: skip
        grid = problem.programs("q_outer", layout.block_q)
    scratch = ("m", "l") if variant == "kv_outer" else ()
    pointers = 5 + len(scratch)  # L's is 0 if nobody wants it
    form = struct.Struct(f"{pointers}Q12q8qfq")

    def pack(addresses: Sequence[int]) -> bytes:
        if not return_lse:
            addresses = (*addresses[:4], 0, *addresses[4:])
        return form.pack(*addresses, *rest)

    kernel = Kernel(variant, layout, problem.dtype)
    return Plan(problem, kernel, device, grid, ("L",) * return_lse + scratch, pack)


def chosen(problem: Problem, views: Sequence[Tensor], capability: tuple[int, int]) -> str:
    """The fastest kernel that takes the problem: ``mma``, on tensor cores, for 16-bit tensors;
    else, and for what it refuses, ``q_outer``."""
    if problem.dtype == "float32":
        return "q_outer"
    taken = (x for x in TENSOR_CORES if not refusal(x, problem, views, capability))
    return next(taken, "q_outer")


def refusal(
    variant: str, problem: Problem, views: Sequence[Tensor], capability: tuple[int, int]
) -> str:
    """Why a tensor-core kernel cannot have this problem; empty if it can."""
    if capability < (8, 0):
        return f"it needs compute capability 8.0, the device has {'.'.join(map(str, capability))}"
    if not mma_layout.takes(problem.d, problem.e):
        return f"widths {problem.d} and {problem.e} must be multiples of 8"
    for x in views:
        steps = (x.pointer, *(stride * x.itemsize for stride in x.kernel_strides()))
        if any(step % ALIGNMENT for step in steps):
            return f"every row of {x.name} must begin at a multiple of {ALIGNMENT} bytes"
    return ""


def tiles(
    device: int, variant: str, d: int, e: int, block_q: int | None, block_k: int | None
) -> Layout:
    """The layout that the portable kernels use on this device."""
    has = driver.limits(device)
    return choose(
        variant, d, e, block_q=block_q, block_k=block_k, shared_per_block=has.shared_per_block,
        shared_per_sm=has.shared_per_sm, registers_per_sm=has.registers_per_sm,
    )  # fmt: skip
