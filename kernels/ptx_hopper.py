"""The instructions of sm_90a: mbarriers, tensor copies (TMA), warpgroup products (wgmma).

As in `ptx`: the ISA text, the operands' layout, and a reference that the emulator runs; a reference
says what happens through ``warp.hopper``, since most of it happens later. What has constants in its
text is made by a function: ``wgmma(N, dtype, ...)``, ``wgmma_wait(pending, registers)``.
"""

from __future__ import annotations

import functools
from typing import Any

from .ptx import COMPILES, emit, instruction, special, widths_bf16, widths_f16

if COMPILES:
    from .ptx import LLVM, _cuda

    types = _cuda.types

WIDEN = {"f16": widths_f16, "bf16": widths_bf16}

# ---- mbarriers: 8 bytes of shared memory, aligned to 8 -------------------------------------------


@instruction("mbarrier.init.shared::cta.b64 [$0], $1;", "", "rr", memory=True)
def mbar_init(warp, barrier, count):
    """Expect ``count`` arrivals a phase. Others may use it after a fence and a block barrier."""
    warp.hopper.init(barrier, count)


@instruction("fence.mbarrier_init.release.cluster;", "", "", memory=True)
def mbar_init_fence(warp):
    """Let asynchronous copies see barriers that this thread initialised."""
    warp.hopper.fence_barriers()


@instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "", "rr", memory=True)
def mbar_expect(warp, barrier, size):
    """Arrive, and let the phase wait for ``size`` more bytes of copies."""
    warp.hopper.arrive(barrier, size)


@instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", "", "r", memory=True)
def mbar_arrive(warp, barrier):
    """Arrive: what this thread did before is seen by who waits for the phase."""
    warp.hopper.arrive(barrier, None)


@instruction(
    "{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 P, [$0], $1; @P bra DONE; "
    "bra AGAIN; DONE: }",
    "", "rr", memory=True,
)  # fmt: skip
def mbar_wait(warp, barrier, parity):
    """Wait until the phase of this parity is over: 0 is the first, 1 the second, and so on."""
    warp.hopper.wait(barrier, parity)


# ---- tensor copies -------------------------------------------------------------------------------

TMA = "cp.async.bulk.tensor.{0}d.shared::cluster.global.mbarrier::complete_tx::bytes"


@instruction(TMA.format(2) + " [$0], [$1, {$2, $3}], [$4];", "", "rlrrr", memory=True)
def tma_load_2d(warp, shared, tensor_map, x, y, barrier):
    """One lane begins to copy a box, from column x and row y; elements outside are zeros.

    The barrier counts the whole box's bytes. A box is rows of 128 bytes, chunks swizzled by the
    row's number modulo 8, so it begins at a multiple of 1024.
    """
    warp.hopper.load(shared, tensor_map, (x, y), barrier)


@instruction(TMA.format(3) + " [$0], [$1, {$2, $3, $4}], [$5];", "", "rlrrrr", memory=True)
def tma_load_3d(warp, shared, tensor_map, x, y, z, barrier):
    """The same from the matrix z of a stack."""
    warp.hopper.load(shared, tensor_map, (x, y, z), barrier)


@instruction(TMA.format(4) + " [$0], [$1, {$2, $3, $4, $5}], [$6];", "", "rlrrrrr", memory=True)
def tma_load_4d(warp, shared, tensor_map, x, y, head, batch, barrier):
    """The same from a tensor [batch, head, row, column]."""
    warp.hopper.load(shared, tensor_map, (x, y, head, batch), barrier)


@instruction(
    "cp.async.bulk.prefetch.tensor.4d.L2.global [$0, {$1, $2, $3, $4}];", "", "lrrrr", memory=True
)
def tma_prefetch_4d(warp, tensor_map, x, y, head, batch):
    """Bring a box to the L2 cache; no effect on values."""


@instruction(
    "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [$0, {$1, $2, $3, $4}], [$5];",
    "", "lrrrrr", memory=True,
)  # fmt: skip
def tma_store_4d(warp, tensor_map, x, y, head, batch, shared):
    """One lane begins to copy a box back; elements outside the tensor are left out.

    The threads that wrote the box need a ``fence_async`` each, then a barrier, before.
    """
    warp.hopper.store(shared, tensor_map, (x, y, head, batch))


@instruction("cp.async.bulk.commit_group;", "", "", memory=True)
def bulk_commit(warp):
    """Close a group: this lane's stores since the last one."""
    warp.hopper.commit_stores()


@functools.cache
def bulk_wait_read(pending: int) -> Any:
    """``wait()``: all but the youngest ``pending`` groups of this lane have read shared memory."""

    @instruction(f"cp.async.bulk.wait_group.read {pending};", "", "", memory=True)
    def wait_read(warp):
        """Shared memory that the stores read may be written, by others after a barrier."""
        warp.hopper.wait_stores(pending, written=False)

    return wait_read


@functools.cache
def bulk_wait(pending: int) -> Any:
    """``wait()``: all but the youngest ``pending`` groups of this lane are done."""

    @instruction(f"cp.async.bulk.wait_group {pending};", "", "", memory=True)
    def wait_written(warp):
        """What the stores wrote may be read, by others after a barrier."""
        warp.hopper.wait_stores(pending, written=True)

    return wait_written


@instruction("fence.proxy.async.shared::cta;", "", "", memory=True)
def fence_async(warp):
    """Let asynchronous units see what this thread wrote to shared memory."""
    warp.hopper.fence_writes()


# ---- warpgroup products --------------------------------------------------------------------------


@instruction("wgmma.fence.sync.aligned;", "", "", memory=True)
def wgmma_fence(warp):
    """Registers that products use are ready; before the first, and after they were touched."""
    warp.hopper.fence_registers()


@instruction("wgmma.commit_group.sync.aligned;", "", "", memory=True)
def wgmma_commit(warp):
    """Close a group: the products since the last one."""
    warp.hopper.commit_products()


@functools.cache
def descriptor(leading: int, stride: int) -> Any:
    """``desc(address)``: where a matrix of 128-byte swizzled rows lies in shared memory.

    Rows along the depth (K-major): ``stride`` bytes from 8 rows to the next 8; 16 of depth are 32
    bytes. Columns along the depth (MN-major): ``leading`` bytes from 64 columns to the next 64,
    ``stride`` from 8 of depth to the next 8.
    """
    high = (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 62

    def define(typingctx, address):
        def codegen(context, builder, sig, operands):
            low = builder.and_(builder.lshr(operands[0], LLVM["r"](4)), LLVM["r"](0x3FFF))
            return builder.or_(builder.zext(low, LLVM["l"]), LLVM["l"](high))

        return types.uint64(types.uint32), codegen

    @special(define)
    def desc(warp, address):
        """The matrix, to the emulator: its address and strides."""
        return address, leading, stride

    return desc


@functools.cache
def descriptor_of_chunk(leading: int, stride: int) -> Any:
    """``descriptor`` for an address in chunks of 16 bytes, below 2**14: the next one is an addition
    away, where every descriptor of an address costs a shift and a mask.
    """
    low, high = (leading >> 4) << 16, (stride >> 4) << 32 | 1 << 62

    def define(typingctx, chunk):
        def codegen(context, builder, sig, operands):
            lower = builder.add(operands[0], LLVM["r"](low))
            return builder.or_(builder.zext(lower, LLVM["l"]), LLVM["l"](high))

        return types.uint64(types.uint32), codegen

    @special(define)
    def desc(warp, chunk):
        """The matrix, to the emulator: its address and strides."""
        return chunk * 16, leading, stride

    return desc


@functools.cache
def wgmma(columns: int, dtype: str, *, a_in_registers: bool, b_transposed: bool) -> Any:
    """``product(acc, a, b, adds)``: acc += A B of a warpgroup, A [64, 16], B [16, columns].

    Warp w of the four has rows 16 w .. 16 w + 15 in ``acc``, columns / 2 float32 in the order of
    mma's C, column tile by column tile. A is a descriptor (K-major), or mma's four registers:
    ``product(acc, a0, a1, a2, a3, b, adds)``. B is a descriptor, K-major, or MN-major if
    ``b_transposed``. ``adds`` 0 overwrites acc. Nothing of it may be touched before a wait.
    """
    R, from_a = columns // 2, 4 if a_in_registers else 1
    acc = ",".join(f"${i}" for i in range(R))
    a = "{" + ",".join(f"${R + i}" for i in range(4)) + "}" if a_in_registers else f"${R}"
    b, adds = f"${R + from_a}", f"${R + from_a + 1}"
    tail = (
        f"p, 1, 1, {int(b_transposed)};" if a_in_registers else f"p, 1, 1, 0, {int(b_transposed)};"
    )
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {adds}, 0; wgmma.mma_async.sync.aligned."
        f"m64n{columns}k16.f32.{dtype}.{dtype} {{{acc}}}, {a}, {b}, {tail} }}"
    )
    ins = ("rrrr" if a_in_registers else "l") + "lr"

    def codegen(context, builder, sig, operands):
        pointers = _registers(context, builder, sig.args[0], operands[0], R)
        old = [builder.load(x) for x in pointers]
        new = emit(builder, text, "f" * R, ins, list(operands[1:]), True, tied=old)
        for pointer, value in zip(pointers, new, strict=True):
            builder.store(value, pointer)
        return context.get_dummy_value()

    if a_in_registers:

        def define(typingctx, acc, a0, a1, a2, a3, b, adds):
            word = types.uint32
            return types.void(acc, word, word, word, word, types.uint64, word), codegen

    else:

        def define(typingctx, acc, a, b, adds):
            return types.void(acc, types.uint64, types.uint64, types.uint32), codegen

    @special(define)
    def product(warp, acc, *operands):
        """Begin the product; it is done when its group is awaited."""
        *a, b, adds = operands
        warp.hopper.begin_product(acc, a, b, adds, columns, WIDEN[dtype], b_transposed)

    return product


@functools.cache
def wgmma_wait(pending: int, registers: int) -> Any:
    """``wait(acc)``: at most ``pending`` groups are left under way; acc may be touched after.

    acc passes through the instruction, so that nothing that reads it can move above.
    """

    def codegen(context, builder, sig, operands):
        pointers = _registers(context, builder, sig.args[0], operands[0], registers)
        old = [builder.load(x) for x in pointers]
        text = f"wgmma.wait_group.sync.aligned {pending};"
        new = emit(builder, text, "f" * registers, "", [], True, tied=old)
        for pointer, value in zip(pointers, new, strict=True):
            builder.store(value, pointer)
        return context.get_dummy_value()

    def define(typingctx, acc):
        return types.void(acc), codegen

    @special(define)
    def wait(warp, acc):
        """Wait for all groups but the youngest ``pending``."""
        warp.hopper.wait_products(pending)

    return wait


@functools.cache
def setmaxnreg(kind: str, registers: int) -> Any:
    """``set()``: give registers back (``dec``) or take some (``inc``), a warpgroup at a time.

    ``registers`` a thread, 24 to 256 in steps of 8. Taking waits until the block has them to give.
    """
    if kind not in ("dec", "inc") or not 24 <= registers <= 256 or registers % 8:
        raise ValueError(f"setmaxnreg: {kind} {registers}: dec or inc, 24 to 256 in steps of 8")

    @instruction(f"setmaxnreg.{kind}.sync.aligned.u32 {registers};", "", "", memory=True)
    def set_registers(warp):
        """No effect on values; all four warps of a warpgroup execute it."""
        warp.hopper.set_registers(kind, registers)

    return set_registers


def _registers(context, builder, array_type, array, count):
    """Pointers to the first elements of a local array, which become registers."""
    data = context.make_array(array_type)(context, builder, array).data
    return [builder.gep(data, [LLVM["l"](i)]) for i in range(count)]
