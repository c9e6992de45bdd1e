"""``emulate``: place the arguments, run every block, report."""

from __future__ import annotations

import dis
import functools
import inspect
import math
import time
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from .. import ptx
from .block import Block
from .flow import LANES, Flow
from .memory import SHARED_BASE, GlobalMemory, Placed, TensorMap, grid_of
from .races import NEVER, Order
from .report import Report
from .source import FLOW, names_of, warp_code
from .warp import Warp

WHEN = ("early", "late")
MOST_SHARED = 227 * 1024  # bytes a block, of any device
MOST_THREADS = 1024
MOST_REGISTERS = 255  # a thread
MOST_BLOCKS = 1 << 20  # which take hours


def emulate(
    kernel: FunctionType,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    *,
    shared_bytes: int = 0,
    names: Sequence[str] | None = None,
    copies: str = "late",
    backwards: bool = False,
    registers: int | None = None,
) -> Report:
    """Run a kernel on the CPU, a warp at a time, and report like a profiler.

    Parameters
    ----------
    kernel : function
        The kernel as it would be given to Numba, undecorated, its source in a file. It takes
        tensors as addresses and reaches memory through the instructions of `kernels.ptx`.
    grid, block : int or up to three ints
        Blocks of the launch, threads of a block.
    args : sequence
        NumPy arrays (or `Placed` ones) become addresses, and hold the results afterwards;
        `TensorMap`s become addresses for tensor copies, None address 0; anything else reaches
        the kernel as it is.
    shared_bytes : int
        Dynamic shared memory of a block.
    names : sequence of str, optional
        Tensors' names in the report, by default the kernel's parameters.
    copies : str
        When asynchronous copies and products are done: ``early``, as soon as they begin, or
        ``late``, when somebody waits for them. A right kernel gives the same under both.
    backwards : bool
        Give turns to the last warp first.
    registers : int, optional
        What a thread has at launch, for ``setmaxnreg`` to give and take; else nobody counts.

    Returns
    -------
    Report
        Faults included: ``emulate(...).check()`` raises if there is one.

    Raises
    ------
    ValueError, TypeError
        Wrong arguments, or a kernel that uses what is not emulated.
    """
    kernel = getattr(kernel, "py_func", kernel)
    start = time.perf_counter()
    grid, block = grid_of(grid), grid_of(block)
    threads, blocks = math.prod(block), math.prod(grid)
    if copies not in WHEN:
        raise ValueError(f"copies: {copies!r} must be one of {', '.join(WHEN)}")
    if threads % LANES or threads > MOST_THREADS:
        raise ValueError(
            f"block: {block} must be whole warps of {LANES} threads, at most {MOST_THREADS} threads"
        )
    if blocks > MOST_BLOCKS:
        raise ValueError(f"grid: {grid}: {blocks} blocks are too many, at most {MOST_BLOCKS}")
    whole = isinstance(shared_bytes, int | np.integer)
    if not whole or shared_bytes not in range(MOST_SHARED + 1):
        raise ValueError(f"shared_bytes: {shared_bytes!r} must be 0 to {MOST_SHARED}")
    if not isinstance(kernel, FunctionType):
        raise TypeError(f"kernel: {kernel!r} must be a function")
    try:
        inspect.signature(kernel).bind(*args)
    except TypeError as error:
        raise TypeError(f"args: {error}") from None
    if registers is not None and registers not in range(1, MOST_REGISTERS + 1):
        raise ValueError(f"registers: {registers!r} must be 1 to {MOST_REGISTERS}")
    report = Report(blocks=blocks, threads=threads, shared_bytes=shared_bytes)
    memory = GlobalMemory(report)
    parameters = kernel.__code__.co_varnames if names is None else names
    if len(parameters) < len(args):
        raise ValueError(f"names: {len(parameters)} for {len(args)} arguments")
    values = [0 if arg is None else arg for arg in args]
    for place, kinds in ((memory.place, np.ndarray | Placed), (memory.place_map, TensorMap)):
        for i, (name, arg) in enumerate(zip(parameters, args, strict=False)):
            if isinstance(arg, kinds):
                values[i] = place(name, arg)
    memory.ready()
    report.tensors = {x: report.tensors[x] for x in parameters if x in report.tensors}  # in order
    order = Order(memory.data.size)
    lanes = [_Lanes(index, block, grid) for index in range(threads // LANES)]
    code = [warp.bind(kernel) for warp in lanes]
    files = set().union(*(warp.files for warp in lanes))
    number = 0
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                running = Block(
                    (x, y, z), number, threads, memory, order, shared_bytes, report, files,
                    early=copies == "early", backwards=backwards, registers=registers,
                )  # fmt: skip
                warps = [warp.enter(running) for warp in lanes]
                running.run(warps, [_call(function, values) for function in code])
                number += 1
    memory.write_back()
    report.seconds = time.perf_counter() - start
    return report


def _call(function: Callable[..., Any], values: list[Any]) -> Callable[[], None]:
    return lambda: function(*values)


class LocalArray:
    """``cuda.local.array``: a thread's own, so a value a lane at each index."""

    def __init__(self, shape: int | tuple[int, ...], flow: Flow, garbage: Any, warp: Warp) -> None:
        self.warp, self.hopper = warp, warp.hopper
        self.shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        self.flow = flow
        self.values = [garbage] * math.prod(self.shape)
        self.in_flight = 0  # products that have it as their sums
        self.touched = NEVER  # after how many wgmma_fences

    def _flat(self, index: Any) -> Any:
        if self.in_flight:
            self.warp.fault("in flight", "touches sums of a product under way: wait for it first")
        self.touched = self.hopper.fences
        flat = 0
        for i, length in zip(
            index if isinstance(index, tuple) else (index,), self.shape, strict=True
        ):
            if isinstance(i, np.ndarray):
                i = np.where(self.flow.mask, i, 0)
                inside = i.min() >= 0 and i.max() < length
            else:
                inside = 0 <= i < length
            if not inside:
                wrong = next(x for x in np.ravel(i) if not 0 <= x < length)
                raise IndexError(f"local array: index {wrong} is outside {self.shape}")
            flat = flat * length + i
        return flat

    def __getitem__(self, index: Any) -> Any:
        flat = self._flat(index)
        if isinstance(flat, np.ndarray):
            return np.stack(
                [np.broadcast_to(self.values[i], LANES)[lane] for lane, i in enumerate(flat)]
            )
        return self.values[flat]

    def __setitem__(self, index: Any, value: Any) -> None:
        flat = self._flat(index)
        if self.touched:
            self.hopper.note(value)
        if isinstance(flat, np.ndarray):
            for i in np.unique(flat[self.flow.mask]):
                chosen = self.flow.mask & (flat == i)
                self.values[i] = np.where(chosen, value, self.values[i])
        elif self.flow.full:
            self.values[flat] = value
        else:
            self.values[flat] = np.where(self.flow.mask, value, self.values[flat])


class _Cuda(SimpleNamespace):
    """What a kernel finds in ``numba.cuda``."""

    def __getattr__(self, name: str) -> Any:
        raise TypeError(f"cuda.{name} is not emulated; kernels/EMULATOR.md says what is")


class _Lanes:
    """One warp's lanes over the whole launch, and the names that its kernel sees."""

    def __init__(self, index: int, block: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
        self.index = index
        thread = index * LANES + np.arange(LANES)
        place = {"x": thread % block[0], "y": thread // block[0] % block[1],
                 "z": thread // (block[0] * block[1])}  # fmt: skip
        self.block_index = SimpleNamespace(x=0, y=0, z=0)
        self.files: set[str] = set()
        self.warp: Warp
        self._bound: dict[int, Any] = {}
        self.cuda = _Cuda(
            threadIdx=SimpleNamespace(**place),
            blockIdx=self.block_index,
            blockDim=SimpleNamespace(**dict(zip("xyz", block, strict=True))),
            gridDim=SimpleNamespace(**dict(zip("xyz", grid, strict=True))),
            syncthreads=lambda: self.warp.syncthreads(),
            syncwarp=lambda: self.warp.syncwarp(),
            shared=SimpleNamespace(array=self._shared_array),
            local=SimpleNamespace(array=self._local_array),
        )
        self.namespaces: list[dict[str, Any]] = []

    def enter(self, block: Block) -> Warp:
        """Begin a block."""
        flow = Flow(np.ones(LANES, bool))
        self.warp = Warp(block, self.index, flow)
        self.block_index.x, self.block_index.y, self.block_index.z = block.index
        for namespace in self.namespaces:
            namespace[FLOW] = flow
            namespace["range"] = flow.range
        return self.warp

    def bind(self, function: FunctionType) -> Any:
        """The function for this warp, its names standing for what they mean here."""
        if id(function) in self._bound:
            return self._bound[id(function)]
        namespace: dict[str, Any] = {}
        self.namespaces.append(namespace)
        self._bound[id(function)] = lambda *x: namespace[function.__name__](
            *x
        )  # if it calls itself
        for name in _names_used(function.__code__):
            known = names_of(function)
            if name in known:
                namespace[name] = self._value(known[name])
        namespace.update(min=_lesser, max=_greater, abs=np.abs, bool=np.bool_)
        self.files.add(function.__code__.co_filename)
        exec(warp_code(function), namespace)
        self._bound[id(function)] = namespace[function.__name__]
        return namespace[function.__name__]

    def _value(self, value: Any) -> Any:
        known = ptx.meaning(value)
        if known is not None:
            return self._instruction(known)
        if value is getattr(ptx._cuda, "cuda", self):
            return self.cuda
        if value is ptx:
            return SimpleNamespace(
                **{name: self._value(x) for name, x in vars(ptx).items() if ptx.meaning(x)}
            )
        plain = getattr(value, "py_func", value)
        if isinstance(plain, FunctionType):
            return self.bind(plain)
        if isinstance(value, ModuleType) and value.__name__ in (
            "numba.cuda",
            "numba_cuda.numba.cuda",
        ):
            return self.cuda
        return value

    def _instruction(self, entry: ptx.Instruction) -> Callable[..., Any]:
        reference, name, letters = entry.reference, entry.name, entry.ins
        convert = [_floats if letter == "f" else _whole_numbers for letter in letters]
        if not entry.text:
            return lambda *operands: reference(self.warp, *operands)

        def run(*operands: Any) -> Any:
            warp = self.warp
            warp.report.instructions[name] += 1
            result = reference(warp, *[f(x) for f, x in zip(convert, operands, strict=True)])
            if warp.hopper.fences:
                warp.hopper.note(result)
            return result

        return run

    def _shared_array(self, shape: Any, dtype: Any, alignment: int | None = None) -> Any:
        if shape != 0:
            raise TypeError("cuda.shared.array: only dynamic shared memory, shape 0, is emulated")
        base = SHARED_BASE
        return SimpleNamespace(address=base if not alignment else -(-base // alignment) * alignment)

    def _local_array(self, shape: Any, dtype: Any, alignment: int | None = None) -> LocalArray:
        whole = "float" not in str(dtype)
        garbage = np.full(LANES, 0xDEADBEEF, np.int64) if whole else np.full(
            LANES, np.nan, np.float32)  # fmt: skip
        return LocalArray(shape, self.warp.flow, garbage, self.warp)


@functools.cache
def _names_used(code: CodeType) -> set[str]:
    """Global and closure names of a function and of those inside it."""
    names = {
        x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    names |= set(code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_used(constant)
    return names


def _floats(x: Any) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x if x.dtype == np.float32 else x.astype(np.float32)
    _set(x)
    return np.full(LANES, x, np.float32)


def _whole_numbers(x: Any) -> np.ndarray:
    if isinstance(x, np.ndarray):
        if x.dtype.kind == "f":
            raise TypeError("an instruction got floats where it takes whole numbers")
        return x
    if isinstance(x, float | np.floating):
        raise TypeError(f"an instruction got {x!r} where it takes a whole number")
    _set(x)
    return np.full(LANES, x, np.int64)


def _set(x: Any) -> None:
    if x is Flow.unset:
        raise UnboundLocalError("an instruction got a variable that has not been assigned")


def _lesser(*values: Any) -> Any:
    return _fold(np.minimum, values) if _vector(values) else min(*values)


def _greater(*values: Any) -> Any:
    return _fold(np.maximum, values) if _vector(values) else max(*values)


def _vector(values: tuple[Any, ...]) -> bool:
    return any(isinstance(x, np.ndarray) for x in values)


def _fold(combine: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    result = values[0]
    for value in values[1:]:
        result = combine(result, value)
    return result
