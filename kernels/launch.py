"""``flash_attention``: validate once, choose tiles, allocate, launch. No numerics here.

``problem.py`` and ``tensors.py`` hold the rules that arguments can break, ``compiled.py`` the
driver.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from . import tensors
from .layout import Layout, buffers, round_up
from .problem import Problem, check_block, check_flag, check_softcap, check_variant
from .tensors import Tensor

TILES = ((64, 64), (64, 32), (32, 32), (32, 16), (16, 16))  # block_q, block_k: the first that fits
SMALLEST = (8, 16)  # fits 48 KiB at the widest, with half a warp a row
ROWS_A_THREAD = 8
MAX_THREADS = 1024  # a block's
WIDE = 128  # from here on a whole warp shares a row of the output, else half a warp


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    variant: str | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
) -> Any:
    """Exact softmax attention on a CUDA GPU, tiled, with float32 arithmetic.

    Parameters
    ----------
    q, k, v : (..., heads, n, d), (..., kv_heads, s, d), (..., kv_heads, s, e)
        float32, float16 or bfloat16, all alike, widths up to 256: NumPy arrays (copied to the GPU
        and back), or Numba, CuPy arrays and torch tensors, used where they lie. kv_heads divides
        heads. The last axis is contiguous. Two dimensions are one head.
    is_causal : bool
        Query i sees the keys up to i + s - n: aligned bottom-right, as in `simattn.attention`
        (torch and JAX align top-left). A row that sees no key gives 0 and L = -inf.
    scale : float, optional
        Multiplies the scores; 1 / sqrt(d) by default.
    window_size : (int, int)
        Keys that a query sees before and after its position, inclusive, -1 for all.
    softcap : float
        Not available yet: only 0 is taken.
    return_lse : bool
        Also return L, float32, natural logarithm.
    out : array, optional
        Where the output goes: its shape and dtype, no overlap with the inputs.
    stream : optional
        None is the current stream of q's library; else an integer handle, a Numba, torch or CuPy
        stream, or an object with ``__cuda_stream__``.
    variant : str, optional
        ``q_outer`` or ``kv_outer``: which tiles stay on chip, see `kernels.flash_simt`. By default
        the fastest kernel that takes the problem, see `chosen`.
    block_q, block_k : int, optional
        Rows of a Q tile and of a K and V tile of `kernels.flash_simt`; by default the largest usual
        ones that fit.

    Returns
    -------
    out, or (out, L)
        In q's container and dtype, on its device. The launch is asynchronous, except for NumPy.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        Before anything is launched or written.
    ImportError, RuntimeError
        Without numba-cuda; without a GPU.
    """
    if variant is not None:
        check_variant(variant)
    check_softcap(softcap)
    check_flag("return_lse", return_lse)
    block_q, block_k = check_block("block_q", block_q), check_block("block_k", block_k)
    inputs, result, handle = tensors.views(q, k, v, out, stream)
    problem = Problem.of(
        *(x.shape for x in inputs), inputs[0].dtype,
        is_causal=is_causal, scale=scale, window_size=window_size,
    )  # fmt: skip
    tensors.check_alike(inputs)
    if out is None and inputs[0].container == "other":
        raise TypeError(f"out: must be given for q of type {type(q).__name__}")
    if result is not None:
        tensors.check_out(result, problem.out_shape, inputs)
    options = {"variant": variant, "block_q": block_q, "block_k": block_k}
    if inputs[0].container == "numpy":
        return _on_numpy(problem, inputs, out, return_lse, handle, options)
    return _on_device(problem, inputs, result, return_lse, handle, **options)


def chosen(problem: Problem, views: list[Tensor]) -> str:
    """The kernel that `flash_attention` launches when it is told none: ``mma``, on tensor cores,
    for 16-bit tensors whose widths are multiples of 8 and whose rows are aligned to 16 bytes, on
    compute capability 8.0 and up; else ``q_outer``."""
    if problem.dtype == "float32":
        return "q_outer"
    from .compiled import limits
    from .launch_mma import takes

    capability = limits(views[0].device or 0).capability
    return "mma" if takes(problem, views, capability) else "q_outer"


def choose(
    variant: str,
    d: int,
    e: int,
    *,
    shared_per_block: int,
    shared_per_sm: int,
    registers_per_sm: int = 65536,
    block_q: int | None = None,
    block_k: int | None = None,
) -> Layout:
    """A layout for these widths that fits a block's shared memory (bytes).

    >>> layout = choose("q_outer", 128, 128, shared_per_block=232448, shared_per_sm=233472)
    >>> layout.block_q, layout.block_k, layout.threads, layout.min_blocks
    (64, 64, 128, 2)
    """
    tried = [(*tile, 32 if e > WIDE else 16) for tile in TILES]
    tried += [(*tile, 16) for tile in (*TILES, SMALLEST)]
    for rows, keys, tx in dict.fromkeys((block_q or r, block_k or k, tx) for r, k, tx in tried):
        ty = 8
        while rows > ty * ROWS_A_THREAD and ty * tx < MAX_THREADS:
            ty *= 2
        layout = Layout(rows, keys, round_up(d, tx), round_up(e, tx), ty, tx)
        needed = buffers(variant, layout).bytes
        if needed <= shared_per_block:
            by_shared = shared_per_sm // (needed + 1024)  # the system keeps 1 KiB a block
            by_registers = registers_per_sm // (layout.threads * layout.registers)
            return replace(layout, min_blocks=max(1, min(by_shared, by_registers)))
    raise ValueError(
        f"block_q, block_k: tiles of {rows} x {keys} at widths {d} and {e} need {needed} bytes of "
        f"shared memory, the device has {shared_per_block} a block"
    )


def choose_for(
    device: int, variant: str, d: int, e: int, block_q: int | None, block_k: int | None
) -> Layout:
    """The layout that `flash_attention` uses on this device."""
    from .compiled import limits

    has = limits(device)
    return choose(
        variant, d, e, block_q=block_q, block_k=block_k, shared_per_block=has.shared_per_block,
        shared_per_sm=has.shared_per_sm, registers_per_sm=has.registers_per_sm,
    )  # fmt: skip


def _on_device(
    problem: Problem,
    inputs: list[Tensor],
    result: Tensor | None,
    return_lse: bool,
    stream: int | None,
    *,
    variant: str | None,
    block_q: int | None,
    block_k: int | None,
) -> Any:
    if variant is None:
        of_simt = block_q is not None or block_k is not None
        views = inputs if result is None else [*inputs, result]
        variant = "q_outer" if of_simt else chosen(problem, views)
    if variant == "mma":
        from .launch_mma import run

        return run(problem, inputs, result, return_lse, stream)
    q = inputs[0]
    strides = [x.kernel_strides() for x in inputs]
    if result is not None:
        strides.append(result.kernel_strides())
    from .compiled import argument_kinds, load, on_device

    device = q.device or 0
    layout = choose_for(device, variant, problem.d, problem.e, block_q, block_k)
    grid = problem.programs(variant, layout.block_q)
    handle = tensors.stream_of(q, stream)
    kernel = load(variant, layout, problem.dtype, device) if grid else None

    if result is None:
        memory = tensors.empty(q, problem.out_shape, problem.dtype, handle)
        result = tensors.view("out", memory, handle)
        strides.append(result.kernel_strides())
    stats = [
        tensors.view(name, tensors.empty(q, problem.lse_shape, "float32", handle), handle)
        for name in (["L"] if return_lse else []) + (["m", "l"] if variant == "kv_outer" else [])
    ]
    if kernel is not None:
        pointers = [x.pointer for x in (*inputs, result, *stats)]
        if not return_lse:
            pointers.insert(4, 0)
        numbers = (x for triple in strides for x in triple)
        args = (*pointers, *numbers, *problem.scalars(), int(return_lse))
        with on_device(device):
            kernel.launch(grid, handle, args, argument_kinds(variant))
    return (result.source, stats[0].source) if return_lse else result.source


def _on_numpy(
    problem: Problem,
    inputs: list[Tensor],
    out: np.ndarray | None,
    return_lse: bool,
    stream: int | None,
    options: dict[str, Any],
) -> Any:
    """Copy to the GPU and back; under the simulator, simulate."""
    from ._cuda import SIMULATOR, cuda

    arrays = [np.ascontiguousarray(_native(x.source)) for x in inputs]
    if SIMULATOR:
        from .counting import run

        blocks = options["block_q"] or 8, options["block_k"] or 8
        variant = options["variant"] or "q_outer"
        simulated = run(problem, arrays, variant, *blocks, return_lse)
        computed, lse = simulated.out, simulated.lse
    else:
        from .compiled import limits

        limits(0)  # says so if there is no GPU
        bits = [x.view(np.uint16) if problem.dtype == "bfloat16" else x for x in arrays]
        on_gpu = [cuda.to_device(x) for x in bits]
        views = [_like(x, tensors.view(x.name, y)) for x, y in zip(inputs, on_gpu, strict=True)]
        if out is None:
            result = cuda.device_array(problem.out_shape, bits[0].dtype)
        else:  # what it holds goes along, so that an element never written shows
            result = cuda.to_device(np.ascontiguousarray(_native(out)).view(bits[0].dtype))
        target = _like(inputs[0], tensors.view("out", result))
        cuda.synchronize()  # the copies are on the default stream, the launch may be on another
        done = _on_device(problem, views, target, return_lse, stream, **options)
        cuda.synchronize()
        computed = result.copy_to_host().view(arrays[0].dtype)
        lse = done[1].copy_to_host() if return_lse else None
    if out is None:
        out = computed
    else:
        out[...] = computed
    return (out, lse) if return_lse else out


def _native(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def _like(host: Tensor, on_gpu: Tensor) -> Tensor:
    """The copy on the GPU under the original's dtype: bfloat16 has travelled as its bits."""
    return replace(on_gpu, dtype=host.dtype)
