"""``flash_attention`` and ``prepare``: validate once, allocate, launch. No numerics here.

``problem.py`` and ``tensors.py`` hold the rules that arguments can break, ``plans.py`` the choice
of kernel and tiles, ``compiled.py`` its way to machine code, ``driver.py`` the launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import compiled, driver, repeats, tensors
from .plans import Plan, plan
from .problem import (
    NO_WINDOW,
    VARIANTS,
    Problem,
    check_block,
    check_flag,
    check_softcap,
    check_variant,
)
from .tensors import Tensor


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    variant: str | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
) -> Any:
    """Exact softmax attention on a CUDA GPU, tiled, with float32 sums.

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
        The kernel: ``sm90`` of `kernels.flash_sm90`, for Hopper; ``mma`` of `kernels.flash_mma`,
        for tensor cores from sm_80 on; ``q_outer`` or ``kv_outer`` of `kernels.flash_simt`, by
        which tiles stay on chip. By default the fastest that takes the problem; `prepare` tells
        which that is.
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
    key = None
    if stream is block_q is block_k is None:
        key, addresses = repeats.key(
            q, k, v, out, is_causal, return_lse, variant, softcap, scale, window_size
        )
        repeat = repeats.find(key)
        if repeat is not None and (answer := repeat.launch(q, out, addresses)) is not None:
            return answer
    call = _Call.of(
        q, k, v, is_causal=is_causal, scale=scale, window_size=window_size, softcap=softcap,
        return_lse=return_lse, out=out, stream=stream, variant=variant, block_q=block_q,
        block_k=block_k,
    )  # fmt: skip
    if call.inputs[0].container == "numpy":
        return _on_numpy(call)
    prepared = _prepare(call)
    prepared.launch(call.stream)
    if key is not None and prepared._built is not None:
        repeats.remember(key, prepared._plan, prepared._built.loaded, prepared._views)
    return prepared.out if prepared.lse is None else (prepared.out, prepared.lse)


def prepare(
    q: Any,
    k: Any,
    v: Any,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    variant: str | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
    layout: Any = None,
) -> Prepared:
    """Everything of `flash_attention` but the launch, for arrays on a GPU.

    Choose, compile, allocate, and pack the arguments once; launch as often as the same memory holds
    new values. Takes and raises what `flash_attention` does, and TypeError for NumPy arrays.
    ``layout`` sets the tiles of a tensor-core kernel: `kernels.mma_layout.MmaLayout`
    for ``mma``, `kernels.sm90_layout.Sm90Layout` for ``sm90``.
    """
    call = _Call.of(
        q, k, v, is_causal=is_causal, scale=scale, window_size=window_size, softcap=softcap,
        return_lse=return_lse, out=out, stream=stream, variant=variant, block_q=block_q,
        block_k=block_k, layout=layout,
    )  # fmt: skip
    if call.inputs[0].container == "numpy":
        raise TypeError("q: ndarray lies on the host; prepare takes arrays on a GPU")
    return _prepare(call)


class Prepared:
    """A launch with its arguments in place. Keeps the tensors alive.

    Attributes
    ----------
    out, lse : array
        What each launch writes; ``lse`` is None if it was not asked for.
    variant : str
        The kernel, as `flash_attention` names it.
    layout
        Its tiles: ``block_q``, ``block_k``, ``threads``.
    registers : int
        A thread's.
    compile_seconds : float
        What compiling and loading took when this process first needed the kernel.
    from_disk : bool
        Whether another process had compiled it.
    """

    def __init__(self, plan: Plan, built: Any, views: list[Tensor], lse: Any, stats: Any) -> None:
        self._plan, self._built, self._views, self._stats = plan, built, views, stats
        self.out, self.lse = views[3].source, lse
        self.variant, self.layout = plan.kernel.variant, plan.kernel.layout
        self.registers = built.loaded.registers if built else 0
        self.compile_seconds = built.seconds if built else 0.0
        self.from_disk = bool(built and built.from_disk)
        pointers = [x.pointer for x in (*views, *stats)]
        self._arguments = built.loaded.arguments(plan.pack(pointers)) if built else None

    def __repr__(self) -> str:
        return (
            f"Prepared({self.variant}, {self._plan.kernel.dtype}, tiles {self.layout.block_q} x "
            f"{self.layout.block_k}, {self._plan.grid} blocks of {self.layout.threads} threads, "
            f"{self.registers} registers, "
            f"{'loaded' if self.from_disk else 'compiled'} in {self.compile_seconds:.2f} s)"
        )

    def launch(self, stream: Any = None) -> None:
        """Queue it, on ``stream`` or the current stream of q's library."""
        if self._built is None:  # nothing to compute
            return
        handle = tensors.stream_of(self._views[0], stream)
        plan = self._plan
        driver.launch(self._built.loaded, plan.device, plan.grid, handle, self._arguments)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call's arguments, checked."""

    problem: Problem
    inputs: list[Tensor]
    out: Tensor | None
    stream: int | None
    return_lse: bool
    variant: str | None
    block_q: int | None
    block_k: int | None
    layout: Any = None

    @classmethod
    def of(
        cls, q, k, v, *, is_causal, scale, window_size, softcap, return_lse, out, stream, variant,
        block_q, block_k, layout=None,
    ) -> _Call:  # fmt: skip
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
        return cls(problem, inputs, result, handle, return_lse, variant, block_q, block_k, layout)


def _prepare(call: _Call) -> Prepared:
    """Choose, compile, then allocate what the caller did not give."""
    q, problem = call.inputs[0], call.problem
    # Memory that we allocate is contiguous and aligned.
    out = call.out or replace(
        q, name="out", pointer=0, shape=problem.out_shape,
        strides=tensors.contiguous(problem.out_shape),
    )  # fmt: skip
    planned = plan(
        problem, [*call.inputs, out], return_lse=call.return_lse, variant=call.variant,
        block_q=call.block_q, block_k=call.block_k, layout=call.layout,
    )  # fmt: skip
    built = compiled.load(planned.kernel, planned.device) if planned.grid else None
    stream = tensors.stream_of(q, call.stream)
    if call.out is None:
        memory = tensors.empty(q, problem.out_shape, problem.dtype, stream)
        out = tensors.view("out", memory, stream)
    stats = [
        tensors.view(name, tensors.empty(q, problem.lse_shape, "float32", stream), stream)
        for name in planned.statistics
    ]
    lse = stats[0].source if call.return_lse else None
    return Prepared(planned, built, [*call.inputs, out], lse, stats)


def _on_numpy(call: _Call) -> Any:
    """Copy to the GPU and back; under the simulator, simulate."""
    from ._cuda import SIMULATOR, cuda

    problem, out = call.problem, call.out and call.out.source
    arrays = [np.ascontiguousarray(_native(x.source)) for x in call.inputs]
    if SIMULATOR:
        from .counting import run

        variant = call.variant or "q_outer"
        if variant not in VARIANTS:
            raise ValueError(
                f"variant: {variant!r} does not run under Numba's simulator; "
                "kernels.emulate and python -m kernels traffic run it without a GPU"
            )
        blocks = call.block_q or 8, call.block_k or 8
        simulated = run(problem, arrays, variant, *blocks, call.return_lse)
        computed, lse = simulated.out, simulated.lse
    else:
        driver.limits(0)  # says so if there is no GPU
        bits = [x.view(np.uint16) if problem.dtype == "bfloat16" else x for x in arrays]
        on_gpu = [cuda.to_device(x) for x in bits]
        views = [
            _like(x, tensors.view(x.name, y)) for x, y in zip(call.inputs, on_gpu, strict=True)
        ]
        if out is None:
            result = cuda.device_array(problem.out_shape, bits[0].dtype)
        else:  # what it holds goes along, so that an element never written shows
            result = cuda.to_device(np.ascontiguousarray(_native(out)).view(bits[0].dtype))
        target = _like(call.inputs[0], tensors.view("out", result))
        cuda.synchronize()  # the copies are on the default stream, the launch may be on another
        prepared = _prepare(replace(call, inputs=views, out=target))
        prepared.launch(call.stream)
        cuda.synchronize()
        computed = result.copy_to_host().view(arrays[0].dtype)
        lse = prepared.lse.copy_to_host() if call.return_lse else None
    if out is None:
        out = computed
    else:
        out[...] = computed
    return (out, lse) if call.return_lse else out


def _native(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def _like(host: Tensor, on_gpu: Tensor) -> Tensor:
    """The copy on the GPU under the original's dtype: bfloat16 has travelled as its bits."""
    return replace(on_gpu, dtype=host.dtype)
