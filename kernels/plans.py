"""Which kernel, which tiles, which arguments: what is the same in all launches of a problem."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import driver, mma_layout, sm90_layout
from .compiled import Kernel
from .layout import Layout, choose
from .mma_layout import MmaLayout
from .problem import DTYPES, TENSOR_CORES, VARIANTS, Problem, shown
from .sm90_layout import WARP_ROWS, Sm90Layout
from .sm90_schedule import work
from .tensor_maps import ELEMENT, MOST_STRIDE, encoder
from .tensors import Tensor

ALIGNMENT = 16  # bytes that a copy of the tensor-core kernels moves
MOST_ROWS = (1 << 30) - 1024  # n + s: these kernels count rows and keys in 32 bits


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
    kernel asked for, or the layout is not for the problem.
    """
    if variant not in (None, *VARIANTS) and (block_q, block_k) != (None, None):
        raise ValueError(f"block_q, block_k: are for {' and '.join(VARIANTS)}, not {variant!r}")
    device = views[0].device or 0
    capability = driver.limits(device).capability
    if variant is None:
        of_simt = block_q is not None or block_k is not None
        variant = "q_outer" if of_simt else chosen(problem, views, capability)
    if layout is not None:
        _check_layout(layout, variant, problem)
    if variant in VARIANTS:
        layout = tiles(device, variant, problem.d, problem.e, block_q, block_k)
        kernel = Kernel(variant, layout, problem.dtype)
        grid = problem.programs(variant, layout.block_q)
        scratch = ("m", "l") if variant == "kv_outer" else ()
        pack = _numbers(problem, views, return_lse, len(scratch))
        return Plan(problem, kernel, device, grid, ("L",) * return_lse + scratch, pack)
    if refused := refusal(variant, problem, views, capability):
        raise ValueError(f"variant: {variant!r} is not for this problem: {refused}")
    layout = layout or usual_layout(variant, problem, capability)
    if variant == "sm90":
        grid, pack = _persistent(problem, views, return_lse, device, layout)
    else:
        grid = problem.programs("q_outer", layout.block_q)
        pack = _numbers(problem, views, return_lse, 0)
    kernel = Kernel(variant, layout, problem.dtype)
    return Plan(problem, kernel, device, grid, ("L",) * return_lse, pack)


def usual_layout(
    variant: str, problem: Problem, capability: tuple[int, int] = (9, 0)
) -> MmaLayout | Sm90Layout:
    """A tensor-core kernel's tiles for this problem, as its table has them."""
    d, e = problem.d, problem.e
    if variant == "sm90":
        is_causal = problem.right == 0
        return sm90_layout.layout_for(d, e, n=problem.n, s=problem.s, is_causal=is_causal)
    return mma_layout.layout_for(d, e, itemsize=DTYPES[problem.dtype], capability=capability)


def _check_layout(layout: Any, variant: str, problem: Problem) -> None:
    """Tiles of the variant's own kind, wide enough, for elements of this size."""
    kind = {"sm90": Sm90Layout, "mma": MmaLayout}.get(variant)
    if kind is None:
        raise ValueError(f"layout: is for {' and '.join(TENSOR_CORES)}, not {variant!r}")
    if not isinstance(layout, kind):
        raise TypeError(f"layout: {shown(layout)} must be {kind.__name__} for {variant!r}")
    if layout.d < problem.d or layout.e < problem.e:
        raise ValueError(
            f"layout: widths {layout.d} and {layout.e} must be at least the problem's, "
            f"{problem.d} and {problem.e}"
        )
    if layout.itemsize != DTYPES[problem.dtype]:
        raise ValueError(
            f"layout: itemsize {layout.itemsize} must be {DTYPES[problem.dtype]} for "
            f"{problem.dtype}"
        )


def _numbers(
    problem: Problem, views: Sequence[Tensor], return_lse: bool, scratch: int
) -> Callable[[Sequence[int]], bytes]:
    """Addresses, strides, numbers. L's address is 0 if nobody wants it."""
    form = struct.Struct(f"{5 + scratch}Q12q8qfq")
    strides = [number for x in views for number in x.kernel_strides()]
    rest = (*strides, *problem.scalars(), int(return_lse))

    def pack(addresses: Sequence[int]) -> bytes:
        if not return_lse:
            addresses = (*addresses[:4], 0, *addresses[4:])
        return form.pack(*addresses, *rest)

    return pack


def _persistent(
    problem: Problem, views: Sequence[Tensor], return_lse: bool, device: int, layout: Any
) -> tuple[int, Callable[[Sequence[int]], bytes]]:
    """The Hopper kernel's grid, and its arguments: tensor maps, the schedule, then the same."""
    if not problem.batch * problem.heads * problem.n:
        return 0, lambda addresses: b""
    table = work(problem, layout, driver.limits(device).sms)
    boxes = (layout.block_q, layout.block_k, layout.block_k, WARP_ROWS)
    encode = [
        encoder(_extent(problem, x), x.kernel_strides(), problem.dtype, rows)
        for x, rows in zip(views, boxes, strict=True)
    ]
    numbers = _numbers(problem, views, return_lse, 0)
    where = struct.pack("Qq", driver.constant(device, table.tobytes()), table.shape[1])

    def pack(addresses: Sequence[int]) -> bytes:
        maps = [make(at) for make, at in zip(encode, addresses[:4], strict=True)]
        return b"".join((*maps, where, numbers(addresses)))

    return len(table), pack


def _extent(problem: Problem, x: Tensor) -> tuple[int, int, int, int]:
    """(batch, heads, rows, width)."""
    heads = x.shape[-3] if len(x.shape) > 2 else 1
    return problem.batch, heads, x.shape[-2], x.shape[-1]


def chosen(problem: Problem, views: Sequence[Tensor], capability: tuple[int, int]) -> str:
    """The fastest kernel that takes the problem: on tensor cores if one does, else ``q_outer``."""
    taken = (x for x in TENSOR_CORES if not refusal(x, problem, views, capability))
    return next(taken, "q_outer")


def refusal(
    variant: str, problem: Problem, views: Sequence[Tensor], capability: tuple[int, int]
) -> str:
    """Why a tensor-core kernel cannot have this problem; empty if it can."""
    least = (9, 0) if variant == "sm90" else (8, 0)
    if capability < least or (variant == "sm90" and capability[0] != 9):
        version, has = (".".join(map(str, x)) for x in (least, capability))
        return f"it needs compute capability {version}, the device has {has}"
    if not mma_layout.takes(problem.d, problem.e):
        return f"widths {problem.d} and {problem.e} must be multiples of 8"
    if problem.n + problem.s > MOST_ROWS:
        return f"{problem.n} rows and {problem.s} keys must be at most {MOST_ROWS} together"
    for x in views:
        steps = (x.pointer, *(stride * x.itemsize for stride in x.kernel_strides()))
        if any(step % ALIGNMENT for step in steps):
            return f"every row of {x.name} must begin at a multiple of {ALIGNMENT} bytes"
    return _refusal_of_copies(problem, views) if variant == "sm90" else ""


def _refusal_of_copies(problem: Problem, views: Sequence[Tensor]) -> str:
    """Why tensor copies cannot have it."""
    if problem.dtype not in ELEMENT:
        return f"dtype {problem.dtype} must be one of {', '.join(ELEMENT)}"
    if not problem.s:
        return "there are no keys"
    for x in views:
        for step, size in zip(x.kernel_strides(), _extent(problem, x)[:3], strict=True):
            if size > 1 and not 0 < step * x.itemsize < MOST_STRIDE:
                return f"strides of {x.name} must be positive and below 2**40 bytes"
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
