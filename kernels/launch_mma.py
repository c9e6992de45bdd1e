"""Compile, load and launch the tensor-core kernel on a GPU. No numerics here.

`attention` is `flash_attention` for what `takes` accepts; ``launch.py`` keeps the portable kernels.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import threading
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from . import tensors
from ._cuda import cuda
from .compiled import Compiled, _check, _driver, argument_kinds, limits, on_device
from .flash_mma import flash_mma, signature
from .mma_layout import CHUNK_BYTES, MmaLayout, layout_for
from .mma_layout import takes as takes_widths
from .problem import DTYPES, Problem
from .tensors import Tensor

Wanted = tuple[MmaLayout, str, tuple[int, int]]  # layout, dtype, compute capability
_texts: dict[Wanted, str] = {}
_lock = threading.Lock()


def takes(problem: Problem, views: Iterable[Tensor], capability: tuple[int, int]) -> bool:
    """Whether the kernel can have this problem: widths, alignment of every row, device."""
    aligned = all(
        x.pointer % CHUNK_BYTES == 0
        and all(stride * x.itemsize % CHUNK_BYTES == 0 for stride in x.kernel_strides())
        for x in views
    )
    return capability >= (8, 0) and takes_widths(problem.d, problem.e) and aligned


def ptx(wanted: Wanted) -> str:
    """Assembly text, made at the first call. Needs no GPU."""
    if wanted not in _texts:
        layout, dtype, capability = wanted
        _texts[wanted], _ = cuda.compile(
            flash_mma(layout, dtype), signature(), device=False, abi="numba", output="ptx",
            cc=(*capability, "a") if capability >= (9, 0) else capability,
            launch_bounds=(layout.threads, layout.min_blocks),
        )  # fmt: skip
    return _texts[wanted]


def compile_all(wanted: Iterable[Wanted]) -> None:
    """Many at once, in processes: Numba compiles one at a time in each."""
    missing = [x for x in dict.fromkeys(wanted) if x not in _texts]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=spawn) as pool:
        _texts.update(zip(missing, pool.map(ptx, missing), strict=True))


def load(layout: MmaLayout, dtype: str, device: int) -> Compiled:
    """The kernel, compiled and loaded at the first call; threads that ask together share it."""
    with _lock:
        return _load(layout, dtype, device)


@functools.cache
def _load(layout: MmaLayout, dtype: str, device: int) -> Compiled:
    driver = _driver()
    text = ptx((layout, dtype, limits(device).capability))
    entry = re.search(r"\.visible \.entry\s+(\S+?)\(", text)
    assert entry is not None
    attribute = driver.CUfunction_attribute
    with on_device(device):
        module = _check(driver.cuModuleLoadData(text.encode() + b"\0"))
        handle = _check(driver.cuModuleGetFunction(module, entry.group(1).encode()))
        most = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(handle, most, layout.shared_bytes))
        registers = _check(driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, handle))
        local = attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
        local_bytes = _check(driver.cuFuncGetAttribute(local, handle))
    return Compiled(handle, layout, layout.shared_bytes, registers, local_bytes)


def run(
    problem: Problem,
    inputs: list[Tensor],
    result: Tensor | None,
    return_lse: bool,
    stream: int | None,
    layout: MmaLayout | None = None,
) -> Any:
    """Launch; what `takes` refuses is not for this. ``layout`` sets the tiles."""
    q = inputs[0]
    device = q.device or 0
    handle = tensors.stream_of(q, stream)
    if result is None:
        memory = tensors.empty(q, problem.out_shape, problem.dtype, handle)
        result = tensors.view("out", memory, handle)
    lse = None
    if return_lse:
        lse = tensors.view("L", tensors.empty(q, problem.lse_shape, "float32", handle), handle)
    layout = layout or layout_for(
        problem.d, problem.e, is_causal=problem.right == 0, itemsize=DTYPES[problem.dtype],
        capability=limits(device).capability,
    )  # fmt: skip
    if grid := problem.programs("q_outer", layout.block_q):
        pointers = [x.pointer for x in (*inputs, result)] + [lse.pointer if lse else 0]
        strides = [number for x in (*inputs, result) for number in x.kernel_strides()]
        args = (*pointers, *strides, *problem.scalars(), int(return_lse))
        with on_device(device):
            load(layout, problem.dtype, device).launch(
                grid, handle, args, argument_kinds("q_outer")
            )
    return (result.source, lse.source) if lse else result.source


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    layout: MmaLayout | None = None,
) -> Any:
    """`flash_attention` on tensor cores, for tensors on a GPU.

    ``layout`` sets the tiles. Raises ValueError for what `takes` refuses, and what
    `flash_attention` raises.
    """
    inputs = [tensors.view(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    problem = Problem.of(
        *(x.shape for x in inputs), inputs[0].dtype,
        is_causal=is_causal, scale=scale, window_size=window_size,
    )  # fmt: skip
    tensors.check_alike(inputs)
    device = inputs[0].device or 0
    result = None
    if out is not None:
        result = tensors.view("out", out)
        tensors.check_out(result, problem.out_shape, inputs)
    views = inputs if result is None else [*inputs, result]
    if not takes(problem, views, limits(device).capability):
        raise ValueError(
            f"q, k, v, out: widths {problem.d} and {problem.e} must be multiples of 8 up to 256, "
            f"every row aligned to {CHUNK_BYTES} bytes, the device sm_80 or newer"
        )
    return run(problem, inputs, result, return_lse, stream, layout)
