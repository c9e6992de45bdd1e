"""PTX instructions as Python functions: what a kernel says to the hardware, and what it means.

Each instruction is one decorated function. The decorator holds the ISA text and the operand types;
the docstring describes what the lanes hold; the body is the reference in NumPy, which
`kernels.emulate` runs a warp at a time. On a GPU Numba inlines the text instead, so that one kernel
source serves both::

    @instruction("ex2.approx.ftz.f32 $0, $1;", "f", "f")
    def ex2(warp, x):
        ...  # the body
        return np.exp2(x)

Operand types are inline PTX's letters: ``r`` a 32-bit register, ``l`` 64 bits, ``f`` float32; the
text numbers the results first, ``$0`` on, then the operands. ``memory=True`` keeps the compiler
from moving memory accesses across; whatever touches memory or waits has it.

A reference takes the emulator's `Warp`, then an array ``[32]`` an operand, a value a lane, and
returns a result a lane. In layouts ``g = lane // 4`` and ``t = lane % 4``. Matrices are written
row, column. Read next: ``flash_mma.py``, a kernel written in these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .tensor_core import multiply_add

try:
    from . import _cuda
except ImportError:  # without numba an instruction is its reference only
    _cuda = None  # type: ignore[assignment]

COMPILES = _cuda is not None and not _cuda.SIMULATOR
LANES = 32
FULL_WARP = "0xffffffff"


@dataclass(frozen=True, slots=True)
class Instruction:
    """A PTX statement and its meaning. Called in a kernel, never outside one."""

    name: str
    text: str  # empty where it stands for no single instruction, such as an address
    outs: str
    ins: str
    reference: Callable[..., Any]

    def __call__(self, *operands: Any) -> Any:
        raise RuntimeError(f"{self.name}: runs in a kernel, on a GPU or under kernels.emulate")


_known: dict[int, tuple[Any, Instruction]] = {}  # by id, since Numba's types define ==


def meaning(value: Any) -> Instruction | None:
    """The instruction that ``value``, a name in a kernel, stands for.

    >>> meaning(ldmatrix_x4).text
    'ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];'
    """
    found = _known.get(id(value))
    return found[1] if found else None


def instructions() -> list[Instruction]:
    """All of them, in the order of this file."""
    return [entry for _, entry in _known.values()]


def instruction(text: str, outs: str, ins: str, *, memory: bool = False):
    """Make an instruction of the reference that follows."""

    def decorate(reference: Callable[..., Any]) -> Any:
        entry = Instruction(reference.__name__, text, outs, ins, reference)
        in_kernel = _inline(entry, memory) if COMPILES else entry
        _known[id(in_kernel)] = in_kernel, entry
        return in_kernel

    return decorate


def special(define: Callable[..., Any] | None):
    """The same for what Numba must be told in its own terms: ``define`` is an intrinsic's body."""

    def decorate(reference: Callable[..., Any]) -> Any:
        entry = Instruction(reference.__name__, "", "", "", reference)
        in_kernel: Any = entry
        if COMPILES and define is not None:
            define.__name__, define.__doc__ = reference.__name__, reference.__doc__
            in_kernel = _cuda.intrinsic(define)
        _known[id(in_kernel)] = in_kernel, entry
        return in_kernel

    return decorate


# ---- how Numba compiles an instruction --------------------------------------------------------

if COMPILES:
    ir, types = _cuda.ir, _cuda.types
    LLVM = {"r": ir.IntType(32), "l": ir.IntType(64), "f": ir.FloatType()}
    NUMBA = {"r": types.uint32, "l": types.uint64, "f": types.float32}


def _inline(entry: Instruction, memory: bool) -> Any:
    """An intrinsic that emits the text, with operands converted to the declared types."""
    outs = [NUMBA[letter] for letter in entry.outs]
    result = types.void if not outs else outs[0] if len(outs) == 1 else types.Tuple(outs)
    signature = result(*[NUMBA[letter] for letter in entry.ins])

    def codegen(context, builder, sig, operands):
        values = emit(builder, entry.text, entry.outs, entry.ins, operands, memory)
        if not values:
            return context.get_dummy_value()
        return values[0] if len(values) == 1 else context.make_tuple(builder, result, values)

    def define(typingctx, *operands):
        return signature, codegen

    define.__name__, define.__doc__ = entry.name, entry.reference.__doc__
    named = ("typingctx", *(f"operand{i}" for i in range(len(entry.ins))))  # Numba counts them
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    define.__signature__ = inspect.Signature([inspect.Parameter(x, positional) for x in named])
    return _cuda.intrinsic(define)


def emit(builder, text: str, outs: str, ins: str, operands, memory: bool, tied=()) -> list[Any]:
    """Write one asm statement; ``tied`` operands are results that it updates. Returns the results.

    Tied operands come first among the results, and their letters are not in ``ins``.
    """
    kinds = [LLVM[letter] for letter in outs]
    returned = ir.VoidType() if not kinds else kinds[0]
    if len(kinds) > 1:
        returned = ir.LiteralStructType(kinds)
    constraints = [f"={letter}" for letter in outs] + list(ins)
    constraints += [str(i) for i in range(len(tied))]
    if memory:
        constraints.append("~{memory}")
    inputs = [LLVM[letter] for letter in ins] + kinds[: len(tied)]
    asm = ir.InlineAsm(
        ir.FunctionType(returned, inputs), text, ",".join(constraints), side_effect=memory
    )
    value = builder.call(asm, [*operands, *tied])
    if len(kinds) <= 1:
        return [value] * len(kinds)
    return [builder.extract_value(value, i) for i in range(len(kinds))]


# ---- numbers -----------------------------------------------------------------------------------


def _cast(name: str, convert: Callable[[Any], Any]) -> Any:
    """An integer type: Numba's own in a compiled kernel, a conversion under the emulator."""
    entry = Instruction(name, "", "", "", lambda warp, x: convert(x))
    in_kernel = getattr(types, name) if COMPILES else entry
    _known[id(in_kernel)] = in_kernel, entry
    return in_kernel


def _wrap(bits: int, signed: bool) -> Callable[[Any], Any]:
    """Integers are int64 under the emulator; a cast to fewer bits drops the others."""
    modulus, half = 1 << bits, 1 << (bits - 1)

    def convert(x: Any) -> Any:
        whole = x.astype(np.int64) if isinstance(x, np.ndarray) else int(x)
        low = whole & (modulus - 1)
        return ((low ^ half) - half) if signed else low

    return convert


i32 = _cast("int32", _wrap(32, True))
u32 = _cast("uint32", _wrap(32, False))
i64 = _cast("int64", lambda x: x.astype(np.int64) if isinstance(x, np.ndarray) else int(x))
u64 = _cast("uint64", lambda x: x.astype(np.int64) if isinstance(x, np.ndarray) else int(x))
f32 = _cast(
    "float32", lambda x: x.astype(np.float32) if isinstance(x, np.ndarray) else np.float32(x)
)


@instruction("ex2.approx.ftz.f32 $0, $1;", "f", "f")
def ex2(warp, x):
    """2**x, to 2 units in the last place; 2**-inf = 0."""
    return np.exp2(x)


@instruction("lg2.approx.ftz.f32 $0, $1;", "f", "f")
def lg2(warp, x):
    """log2(x); -inf at 0."""
    return np.log2(x)


@instruction("max.ftz.f32 $0, $1, $2;", "f", "ff")
def fmax(warp, x, y):
    """The larger; of a NaN and a number, the number."""
    return np.fmax(x, y)


@instruction("fma.rn.ftz.f32 $0, $1, $2, $3;", "f", "fff")
def fma(warp, x, y, z):
    """x * y + z, rounded once."""
    return (x.astype(np.float64) * y + z).astype(np.float32)


@instruction("mul.rn.ftz.f32 $0, $1, $2;", "f", "ff")
def fmul(warp, x, y):
    """x * y, never fused with an addition."""
    return x * y


@instruction("add.rn.ftz.f32 $0, $1, $2;", "f", "ff")
def fadd(warp, x, y):
    """x + y, never fused with a product."""
    return x + y


@instruction("rcp.approx.ftz.f32 $0, $1;", "f", "f")
def rcp(warp, x):
    """1 / x, to a unit in the last place; 0 of infinity."""
    return np.float32(1) / x


@instruction("cvt.rn.f16x2.f32 $0, $2, $1;", "r", "ff")
def pack_f16(warp, low, high):
    """Two float32 rounded to float16, ``low`` in the lower half: lower columns come first."""
    return _pack(_half_bits(low), _half_bits(high))


@instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", "r", "ff")
def pack_bf16(warp, low, high):
    """Two float32 rounded to bfloat16, ``low`` in the lower half."""
    return _pack(_bfloat_bits(low), _bfloat_bits(high))


@instruction("{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.f32.f16 $0, h; }", "f", "r")
def widen_f16(warp, bits):
    """float32 of the float16 in the lower half."""
    return (bits & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32)


@instruction("shl.b32 $0, $1, 16;", "f", "r")
def widen_bf16(warp, bits):
    """float32 of the bfloat16 in the lower half: bfloat16 is float32's upper half."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@instruction("fma.rn.f16x2 $0, $1, $2, $3;", "r", "rrr")
def fma_f16x2(warp, x, y, z):
    """x * y + z of two float16 in each register."""
    x, y, z = (widths_f16(v) for v in (x, y, z))
    low, high = np.moveaxis(x * y + z, -1, 0)
    return _pack(_half_bits(low), _half_bits(high))


@instruction("fma.rn.bf16x2 $0, $1, $2, $3;", "r", "rrr")
def fma_bf16x2(warp, x, y, z):
    """The same for bfloat16."""
    x, y, z = (widths_bf16(v) for v in (x, y, z))
    low, high = np.moveaxis(x * y + z, -1, 0)
    return _pack(_bfloat_bits(low), _bfloat_bits(high))


@instruction("bmsk.clamp.b32 $0, $1, $2;", "r", "rr")
def bit_mask(warp, first, count):
    """``count`` ones from bit ``first`` on; those past bit 31 are dropped."""
    first, count = (np.minimum(np.asarray(x).astype(np.uint64), 32) for x in (first, count))
    one = np.uint64(1)
    return ((one << first + count) - (one << first)) & np.uint64(0xFFFFFFFF)


@instruction("cvt.rna.tf32.f32 $0, $1;", "r", "f")
def to_tf32(warp, x):
    """float32 rounded to TF32's 10 bits of mantissa, ties away from zero, as a register."""
    bits = x.view(np.uint32)
    special_value = (bits & np.uint32(0x7F800000)) == 0x7F800000
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(special_value, bits, rounded)


@instruction(
    "{ .reg .b32 x; add.u32 x, $2, 0x1000; and.b32 x, x, 0xffffe000; "
    "sub.rn.ftz.f32 $1, $2, x; mov.b32 $0, x; }",
    "rr", "r",
)  # fmt: skip
def split_tf32(warp, bits):
    """The bits of a float32 as big, the nearest TF32, and the rest, exact: a sign and 12 bits.

    Three instructions, where cvt alone takes five to pass infinities and NaN on: here the rest of
    both is NaN.
    """
    x = bits.astype(np.uint32)
    big = (x + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    with np.errstate(invalid="ignore"):
        return big, (x.view(np.float32) - big.view(np.float32)).view(np.uint32)


@instruction(
    "{ .reg .b32 x, y; add.u32 x, $1, 0x1000; and.b32 x, x, 0xffffe000; "
    "sub.rn.ftz.f32 x, $1, x; and.b32 y, x, 0xffffe000; sub.rn.ftz.f32 $0, x, y; }",
    "r", "r",
)  # fmt: skip
def lost_tf32(warp, bits):
    """What split_tf32's two parts lose as TF32: the last of the 12 bits, or 0."""
    rest = meaning(split_tf32).reference(warp, bits)[1].view(np.float32)
    with np.errstate(invalid="ignore"):
        return (rest - widths_tf32(rest.view(np.uint32))).view(np.uint32)


@instruction("mov.b32 $0, $1;", "r", "f")
def float_bits(warp, x):
    """The 32 bits of a float32."""
    return x.view(np.uint32)


@instruction("mov.b32 $0, $1;", "f", "r")
def bits_float(warp, bits):
    """The float32 of 32 bits."""
    return bits.astype(np.uint32).view(np.float32)


@instruction("mov.b32 $0, $1;", "r", "r", memory=True)
def anew(warp, x):
    """x, as something the compiler cannot recognise: what is computed from it is computed again,
    instead of being kept in registers since the last time.
    """
    return x


def _half_bits(x):
    return x.astype(np.float16).view(np.uint16)


def _bfloat_bits(x):
    """Round to nearest, ties to even; NaN stays one."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def _pack(low, high):
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


# ---- global and shared memory ------------------------------------------------------------------


@instruction("ld.global.nc.b32 $0, [$1];", "r", "l", memory=True)
def ld_global_b32(warp, address):
    """4 bytes a lane, address a multiple of 4."""
    return _words(warp.load_global(address, 4))[:, 0]


@instruction("ld.global.b32 $0, [$1];", "r", "l", memory=True)
def ld_global_b32_written(warp, address):
    """The same of what the kernel itself has written."""
    return _words(warp.load_global(address, 4))[:, 0]


@instruction("{ .reg .b16 h; ld.global.nc.b16 h, [$1]; cvt.u32.u16 $0, h; }", "r", "l", memory=True)
def ld_global_b16(warp, address):
    """2 bytes a lane, zero-extended."""
    return warp.load_global(address, 2).view(np.uint16)[:, 0].astype(np.uint32)


@instruction("ld.global.nc.v4.b32 {$0,$1,$2,$3}, [$4];", "rrrr", "l", memory=True)
def ld_global_v4(warp, address):
    """16 bytes a lane, address a multiple of 16."""
    return tuple(_words(warp.load_global(address, 16)).T)


@instruction("st.global.f32 [$0], $1;", "", "lf", memory=True)
def st_global_f32(warp, address, x):
    """4 bytes a lane, address a multiple of 4."""
    warp.store_global(address, _bytes(x))


@instruction("st.global.b32 [$0], $1;", "", "lr", memory=True)
def st_global_b32(warp, address, x):
    """4 bytes a lane, address a multiple of 4."""
    warp.store_global(address, _bytes(x.astype(np.uint32)))


@instruction("{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0], h; }", "", "lr", memory=True)
def st_global_b16(warp, address, x):
    """The lower 2 bytes of a register."""
    warp.store_global(address, _bytes((x & 0xFFFF).astype(np.uint16)))


@instruction("st.global.v4.b32 [$0], {$1,$2,$3,$4};", "", "lrrrr", memory=True)
def st_global_v4(warp, address, *x):
    """16 bytes a lane, address a multiple of 16."""
    warp.store_global(address, _bytes(np.stack(x, axis=1).astype(np.uint32)))


@instruction("atom.global.add.u32 $0, [$1], $2;", "r", "lr", memory=True)
def atom_global_add(warp, address, x):
    """Add to 4 bytes, address a multiple of 4, undivided; the value before. Orders nothing else."""
    return warp.add_global(address, x)


@instruction("ld.shared.b32 $0, [$1];", "r", "r", memory=True)
def ld_shared_b32(warp, address):
    """4 bytes a lane, address a multiple of 4."""
    return _words(warp.load_shared(address, 4))[:, 0]


@instruction("ld.shared.v2.b32 {$0,$1}, [$2];", "rr", "r", memory=True)
def ld_shared_v2(warp, address):
    """8 bytes a lane, address a multiple of 8; half a warp at a time."""
    return tuple(_words(warp.load_shared(address, 8)).T)


@instruction("ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", "rrrr", "r", memory=True)
def ld_shared_v4(warp, address):
    """16 bytes a lane, address a multiple of 16; eight lanes at a time."""
    return tuple(_words(warp.load_shared(address, 16)).T)


@instruction("st.shared.b32 [$0], $1;", "", "rr", memory=True)
def st_shared_b32(warp, address, x):
    """4 bytes a lane, address a multiple of 4."""
    warp.store_shared(address, _bytes(x.astype(np.uint32)))


@instruction("st.shared.v2.b32 [$0], {$1,$2};", "", "rrr", memory=True)
def st_shared_v2(warp, address, *x):
    """8 bytes a lane, address a multiple of 8; half a warp at a time."""
    warp.store_shared(address, _bytes(np.stack(x, axis=1).astype(np.uint32)))


@instruction("st.shared.v4.b32 [$0], {$1,$2,$3,$4};", "", "rrrrr", memory=True)
def st_shared_v4(warp, address, *x):
    """16 bytes a lane, address a multiple of 16; eight lanes at a time."""
    warp.store_shared(address, _bytes(np.stack(x, axis=1).astype(np.uint32)))


def _words(data):
    return np.ascontiguousarray(data).view(np.uint32)


def _bytes(x):
    return np.ascontiguousarray(x).view(np.uint8).reshape(LANES, -1)


# ---- asynchronous copies, global to shared -----------------------------------------------------


@instruction("cp.async.cg.shared.global [$0], [$1], 16, $2;", "", "rlr", memory=True)
def cp_async_16(warp, shared, address, size):
    """Copy ``size`` <= 16 bytes past the L1 cache and zero the rest of the 16; both aligned to 16.

    Nothing is read where size is 0, and the address may be anything. The copy is done once the lane
    that began it waits for its group; other lanes need a barrier after that.
    """
    warp.copy_async(shared, address, size, 16)


@instruction("cp.async.ca.shared.global [$0], [$1], 4, $2;", "", "rlr", memory=True)
def cp_async_4(warp, shared, address, size):
    """The same for 4 bytes, aligned to 4, through the L1 cache."""
    warp.copy_async(shared, address, size, 4)


@instruction("cp.async.commit_group;", "", "", memory=True)
def cp_async_commit(warp):
    """Close a group: a lane's copies since the last one."""
    warp.commit_copies()


@instruction("cp.async.wait_group 0;", "", "", memory=True)
def cp_async_wait_0(warp):
    """Wait for all of this lane's closed groups."""
    warp.wait_copies(0)


@instruction("cp.async.wait_group 1;", "", "", memory=True)
def cp_async_wait_1(warp):
    """Wait until at most the youngest closed group is under way."""
    warp.wait_copies(1)


# ---- between the lanes of a warp ---------------------------------------------------------------


@instruction(f"shfl.sync.bfly.b32 $0, $1, $2, 0x1f, {FULL_WARP};", "f", "fr", memory=True)
def shfl_xor(warp, x, mask):
    """The value of lane ``lane ^ mask``."""
    warp.together("shfl_xor")
    return x[(np.arange(LANES) ^ mask) & 31]


@instruction(f"shfl.sync.idx.b32 $0, $1, $2, 0x1f, {FULL_WARP};", "r", "rr", memory=True)
def shfl_idx(warp, x, lane):
    """The register of lane ``lane``."""
    warp.together("shfl_idx")
    return x[lane & 31]


@instruction(
    "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, " + FULL_WARP + "; }",
    "r", "r", memory=True,
)  # fmt: skip
def ballot(warp, x):
    """Bit i is set where lane i's register is not 0; alike in all lanes."""
    warp.together("ballot")
    return np.full(LANES, sum(1 << i for i in range(LANES) if x[i]), np.uint32)


# ---- barriers ----------------------------------------------------------------------------------


@instruction("barrier.sync $0, $1;", "", "rr", memory=True)
def bar_sync(warp, barrier, threads):
    """Wait until ``threads`` have come to this barrier, 1 to 15; what they wrote before is seen."""
    warp.named_barrier(barrier, threads, waits=True)


@instruction("barrier.arrive $0, $1;", "", "rr", memory=True)
def bar_arrive(warp, barrier, threads):
    """Count as having come, and go on."""
    warp.named_barrier(barrier, threads, waits=False)


# ---- matrices in shared memory -----------------------------------------------------------------


@instruction(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "rrrr", "r", memory=True
)
def ldmatrix_x4(warp, row):
    """Four matrices [8, 8] of 16 bits. Lane 8i + r gives the address of row r of matrix i.

    Register i of a lane gets matrix i's (g, 2t) in its lower half and (g, 2t + 1) above. A row is
    16 bytes, aligned to 16; the eight rows of a matrix are read together.
    """
    return tuple(_matrices(warp, row).reshape(4, 8, 4, 2).view(np.uint32).reshape(4, LANES))


@instruction(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];", "rrrr", "r", memory=True
)
def ldmatrix_x4_trans(warp, row):
    """The same, each matrix transposed: a lane's register i gets (2t, g) and (2t + 1, g)."""
    transposed = np.ascontiguousarray(_matrices(warp, row).transpose(0, 2, 1))
    return tuple(transposed.reshape(4, 8, 4, 2).view(np.uint32).reshape(4, LANES))


@instruction(
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};", "", "rrrrr", memory=True
)
def stmatrix_x4(warp, row, *x):
    """The reverse of ldmatrix_x4 (sm_90 up)."""
    warp.together("stmatrix_x4")
    rows = np.stack(x).astype(np.uint32).reshape(4, 8, 4)
    warp.store_shared(row, rows.view(np.uint8).reshape(LANES, 16))


def _matrices(warp, row):
    """[4, 8, 8] of 16 bits, from 32 rows of 16 bytes."""
    warp.together("ldmatrix_x4")
    return warp.load_shared(row, 16).view(np.uint16).reshape(4, 8, 8)


# ---- tensor cores ------------------------------------------------------------------------------

MMA_16 = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
    "{{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};"
)


@instruction(MMA_16.format("f16"), "ffff", "rrrrrrffff")
def mma_f16(warp, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """C += A B, A [16, 16] and B [16, 8] float16, C [16, 8] float32.

    ====  =======================  ====  =======================  ====  ====================
    a0    A (g, 2t), (g, 2t+1)     b0    B (2t, g), (2t+1, g)     c0    C (g, 2t)
    a1    A (g+8, 2t), ...         b1    B (2t+8, g), ...         c1    C (g, 2t+1)
    a2    A (g, 2t+8), ...                                        c2    C (g+8, 2t)
    a3    A (g+8, 2t+8), ...                                      c3    C (g+8, 2t+1)
    ====  =======================  ====  =======================  ====  ====================
    """
    return _mma_16(warp, widths_f16, (a0, a1, a2, a3), (b0, b1), (c0, c1, c2, c3))


@instruction(MMA_16.format("bf16"), "ffff", "rrrrrrffff")
def mma_bf16(warp, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """The same for bfloat16."""
    return _mma_16(warp, widths_bf16, (a0, a1, a2, a3), (b0, b1), (c0, c1, c2, c3))


@instruction(
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    "ffff", "rrrrrrffff",
)  # fmt: skip
def mma_tf32(warp, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """C += A B, A [16, 8] and B [8, 8] TF32 in 32-bit registers, C [16, 8] as for mma_f16.

    ====  ===========  ====  ===========
    a0    A (g, t)     b0    B (t, g)
    a1    A (g+8, t)   b1    B (t+4, g)
    a2    A (g, t+4)
    a3    A (g+8, t+4)
    ====  ===========  ====  ===========

    The lower 13 bits of a register are ignored.
    """
    warp.together("mma_tf32")
    A = widths_tf32(np.stack((a0, a1, a2, a3))).reshape(2, 2, 8, 4)  # [column half, row half, g, t]
    A = A.transpose(1, 2, 0, 3).reshape(16, 8)
    B = widths_tf32(np.stack((b0, b1))).reshape(2, 8, 4).transpose(1, 0, 2).reshape(8, 8)
    return _add_product(A, B.T, (c0, c1, c2, c3))


def widths_f16(registers):
    """float32 of the float16 pairs in registers: [..., n] to [..., n, 2]."""
    return registers.astype(np.uint32)[..., None].view(np.float16).astype(np.float32)


def widths_bf16(registers):
    """float32 of the bfloat16 pairs in registers."""
    bits = registers.astype(np.uint32)[..., None].view(np.uint16).astype(np.uint32)
    return (bits << np.uint32(16)).view(np.float32)


def widths_tf32(registers):
    """float32 of TF32 in registers."""
    return (registers.astype(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def rows_of_a(widen, a):
    """A [16, 16] from its registers a0..a3."""
    halves = widen(np.stack(a)).reshape(2, 2, 8, 4, 2)  # [column half, row half, g, t, pair]
    return halves.transpose(1, 2, 0, 3, 4).reshape(16, 16)


def _mma_16(warp, widen, a, b, c):
    warp.together("mma")
    B = widen(np.stack(b)).reshape(2, 8, 4, 2).transpose(1, 0, 2, 3).reshape(8, 16)  # [column, row]
    return _add_product(rows_of_a(widen, a), B.T, c)


def _add_product(A, B, c):
    """Registers c0..c3 plus a product [16, 8]."""
    C = np.stack(c).reshape(2, 2, 8, 4).transpose(0, 2, 3, 1).reshape(16, 8)
    C = multiply_add(A, B, C)
    return tuple(C.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, LANES))


# ---- what is no instruction --------------------------------------------------------------------


def _shared_address(typingctx, array):
    def codegen(context, builder, sig, operands):
        data = context.make_array(sig.args[0])(context, builder, operands[0]).data
        pointer = builder.ptrtoint(data, LLVM["l"])
        text = "{ .reg .u64 p; cvta.to.shared.u64 p, $1; cvt.u32.u64 $0, p; }"
        return emit(builder, text, "r", "l", [pointer], False)[0]

    return types.uint32(array), codegen


@special(_shared_address)
def shared_address(warp, array):
    """Where a shared array starts, in the 32-bit addresses that instructions take."""
    return array.address


def _unroll(typingctx):
    def codegen(context, builder, sig, operands):
        for block in _back_edges(builder.function.blocks):
            module = builder.module
            hint = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.full")])
            loop = ir.MDValue(module, [hint], name=str(len(module.metadata)))
            loop.operands = (loop, hint)  # a loop's identity refers to itself
            block.terminator.set_metadata("llvm.loop", loop)
        return context.get_dummy_value()

    return types.void(), codegen


@special(_unroll)
def unroll_loops(warp):
    """As a kernel's last statement: unroll its loops of constant length, so that local arrays which
    they index become registers. The compiler by itself leaves long ones, and the arrays in memory.
    """


def _back_edges(blocks):
    """The blocks that jump back to the head of a loop: those a depth-first walk is still inside."""
    entered: set[Any] = set()
    inside: set[Any] = set()
    for root in blocks:
        path = [] if root in entered else [(root, _successors(root))]
        entered.add(root)
        inside.add(root)
        while path:
            block, rest = path[-1]
            after = next(rest, None)
            if after is None:
                inside.discard(block)
                path.pop()
            elif after in inside:
                yield block
            elif after not in entered:
                entered.add(after)
                inside.add(after)
                path.append((after, _successors(after)))
        inside.clear()


def _successors(block):
    operands = getattr(block.terminator, "operands", ()) if block.terminator is not None else ()
    return iter([x for x in operands if isinstance(x, ir.Block)])
