"""Tensor copies, mbarriers and warpgroup products under the emulator, right and with faults."""

from __future__ import annotations

import re

import numpy as np
import pytest
import toolkit

pytest.importorskip("numba_cuda", reason="kernels are written against numba.cuda")

from kernels._cuda import SIMULATOR, cuda, types
from kernels.emulator import Placed, TensorMap, emulate
from kernels.ptx import (
    i32,
    ld_global_b32,
    ld_shared_v4,
    pack_f16,
    shared_address,
    shfl_idx,
    st_global_b32,
    st_global_f32,
    st_global_v4,
    st_shared_v4,
    u32,
    u64,
    unroll_loops,
)
from kernels.ptx_hopper import (
    bulk_commit,
    bulk_wait,
    bulk_wait_read,
    descriptor,
    fence_async,
    mbar_arrive,
    mbar_expect,
    mbar_init,
    mbar_init_fence,
    mbar_wait,
    setmaxnreg,
    tma_load_3d,
    tma_load_4d,
    tma_prefetch_4d,
    tma_store_4d,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from kernels.tensor_core import HOPPER, multiply_add, truncated

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the emulator takes kernels meant for a GPU")
ROWS, N, STAGES = 64, 64, 2
TILE = 64 * 128  # bytes of 64 rows of 64 float16
BARRIERS = 4 * TILE
SHARED_BYTES = BARRIERS + 64 + 1024
THREADS = 160  # a warpgroup that multiplies, and a warp that copies

FAULTS = {
    "no wait for the copy": {"in flight", "race"},
    "no wait for the product": {"in flight"},
    "no wait for the empty stage": {"race", "in flight", "barrier"},
    "stage given back too early": {"race", "in flight"},
    "wrong parity": {"deadlock", "in flight", "race"},
    "too few bytes": {"deadlock", "barrier", "in flight", "race"},
    "no barrier after init": {"race", "barrier"},
    "box off the grid": {"alignment"},
    "arrives twice": {"barrier"},
}


def product(fault: str = "", transposed: bool = False):
    """C [64, 64] = sum over tiles of A_t B_t^T (or A_t B_t): a producer and a consumer.

    A is [tiles, 64, 64], B too. Two stages; tile t is in stage t mod 2.
    """
    multiply = wgmma(N, "f16", a_in_registers=False, b_transposed=transposed)
    wait = wgmma_wait(0, N // 2)
    matrix = descriptor(16, 1024)
    columns = descriptor(TILE, 1024)
    no_copy_wait = fault == "no wait for the copy"
    no_product_wait = fault == "no wait for the product"
    no_empty_wait = fault == "no wait for the empty stage"
    early = fault == "stage given back too early"
    wrong = 1 if fault == "wrong parity" else 0
    size = 2 * TILE - (128 if fault == "too few bytes" else 0)
    no_barrier = fault == "no barrier after init"
    off = 128 if fault == "box off the grid" else 0
    twice = fault == "arrives twice"
    R, ZERO = N // 2, np.float32(0)  # sums a lane

    def kernel(A, B, C, tiles):
        smem = cuda.shared.array(0, types.uint8)
        acc = cuda.local.array(R, types.float32)
        base = u32((shared_address(smem) + u32(1023)) & u32(0xFFFFFC00))
        full, empty = u32(base + BARRIERS), u32(base + BARRIERS + 8 * STAGES)
        tid = i32(cuda.threadIdx.x)
        warp = i32(shfl_idx(u32(tid >> 5), u32(0)))
        lane = i32(tid & 31)
        if tid == 0:
            for i in range(STAGES):
                mbar_init(u32(full + 8 * i), u32(1))
                mbar_init(u32(empty + 8 * i), u32(4))
            mbar_init_fence()
        if not no_barrier:
            cuda.syncthreads()  # write-read: the mbarriers

        if warp == 4:
            if lane == 0:
                for t in range(tiles):
                    stage, turn = i32(t % STAGES), i32(t // STAGES)
                    if not no_empty_wait:
                        mbar_wait(u32(empty + 8 * stage), u32((turn + 1) & 1))
                    mbar_expect(u32(full + 8 * stage), u32(size))
                    if twice:
                        mbar_arrive(u32(full + 8 * stage))
                    at = u32(base + stage * 2 * TILE + off)
                    tma_load_3d(at, A, i32(0), i32(0), t, u32(full + 8 * stage))
                    tma_load_3d(u32(at + TILE), B, i32(0), i32(0), t, u32(full + 8 * stage))
        else:
            for i in range(R):
                acc[i] = ZERO
            for t in range(tiles):
                stage, turn = i32(t % STAGES), i32(t // STAGES)
                if not no_copy_wait:
                    mbar_wait(u32(full + 8 * stage), u32((turn + wrong) & 1))
                if early and lane == 0:
                    mbar_arrive(u32(empty + 8 * stage))
                at = u32(base + stage * 2 * TILE)
                wgmma_fence()
                for k in range(4):
                    if transposed:
                        multiply(
                            acc,
                            matrix(u32(at + 32 * k)),
                            columns(u32(at + TILE + 2048 * k)),
                            u32(1),
                        )
                    else:
                        multiply(
                            acc, matrix(u32(at + 32 * k)), matrix(u32(at + TILE + 32 * k)), u32(1)
                        )
                wgmma_commit()
                if not no_product_wait:
                    wait(acc)
                if not early and lane == 0:
                    mbar_arrive(u32(empty + 8 * stage))
            row, column = i32(16 * warp + (lane >> 2)), i32(2 * (lane & 3))
            for j in range(N // 8):
                for c in range(4):
                    at = (row + 8 * (c >> 1)) * N + 8 * j + column + (c & 1)
                    st_global_f32(C + u64(at) * u64(4), acc[4 * j + c])
        unroll_loops()

    return kernel


def run(fault="", tiles=5, rows=64, **options):
    rng = np.random.default_rng(0)
    A, B = (rng.standard_normal((tiles, rows, 64)).astype(np.float16) for _ in range(2))
    C = np.full((64, 64), np.nan, np.float32)
    transposed = options.pop("transposed", False)
    report = emulate(
        product(fault, transposed), 1, THREADS, [TensorMap(A, 64), TensorMap(B, 64), C, tiles],
        shared_bytes=SHARED_BYTES, **options,
    )  # fmt: skip
    full_A, full_B = (np.zeros((tiles, 64, 64)) for _ in range(2))
    full_A[:, :rows], full_B[:, :rows] = A, B
    right = sum(a @ (b if transposed else b.T) for a, b in zip(full_A, full_B, strict=True))
    return C, right, report


@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [64, 50])
def test_copies_and_products_are_those_of_matrices(copies, transposed, rows):
    C, right, report = run(copies=copies, transposed=transposed, rows=rows)
    report.check()
    np.testing.assert_allclose(C, right, rtol=0, atol=1e-4)
    assert report.tensors["A"].read_bytes == 5 * rows * 128
    assert report.tensors["A"].read_sectors == 5 * TILE // 32  # the whole box


def test_products_truncate_their_sums_as_tensor_cores_do():
    """To the bit, 16 columns of A and B at a time."""
    rng = np.random.default_rng(0)
    A, B = (rng.standard_normal((5, 64, 64)).astype(np.float16) for _ in range(2))  # `run`'s
    right = np.zeros((64, 64), np.float32)
    with truncated(HOPPER):
        C, _, _ = run()
        for a, b in zip(A.astype(np.float32), B.astype(np.float32), strict=True):
            for k in range(0, 64, 16):
                right = multiply_add(a[:, k : k + 16], b.T[k : k + 16], right)
    rounded, _, _ = run()
    assert (right == C).all()
    assert (rounded != C).any()


@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_caught(fault, copies):
    _, _, report = run(fault, copies=copies)
    assert report.faults, fault
    assert report.faults[0].kind in FAULTS[fault], report


# ---- tensors of four axes, to shared memory and back --------------------------------------------

BOX_ROWS, BOX = 16, 16 * 128
COPY_FAULTS = {
    "no init fence": {"fence"},
    "no fence after writing": {"fence"},
    "one thread fences": {"fence"},
    "fence before writing": {"fence"},
    "fence after the barrier": {"fence"},
    "no barrier before the store": {"race", "uninitialised"},
    "stage used again": {"in flight"},
    "no barrier after the wait": {"race"},
    "no wait at the end": {"in flight"},
    "not committed": {"in flight"},
    "waits for one group too few": {"in flight"},
    "store off the grid": {"alignment"},
    "store outside": {"bounds"},
    "stored twice": {"race"},
    "read back too early": {"race"},
    "no map": {"bounds"},
}


def copier(fault: str = ""):
    """O = X, box by box: loaded, moved by threads to a second stage, stored from there."""
    no_init_fence, not_committed = fault == "no init fence", fault == "not committed"
    one_fences, no_fence = fault == "one thread fences", fault == "no fence after writing"
    fences_before, fences_late = fault == "fence before writing", fault == "fence after the barrier"
    no_barrier = fault == "no barrier before the store"
    again, off = fault == "stage used again", 128 if fault == "store off the grid" else 0
    no_barrier_after = fault == "no barrier after the wait"
    no_end = fault == "no wait at the end"
    far = 8 * BOX if fault == "store outside" else 0
    twice, no_map = fault == "stored twice", fault == "no map"
    wait_read = bulk_wait_read(1 if fault == "waits for one group too few" else 0)
    wait_end = bulk_wait_read(0) if fault == "read back too early" else bulk_wait(0)

    def kernel(X, O, out, heads, row_boxes, column_boxes):
        smem = cuda.shared.array(0, types.uint8)
        base = u32((shared_address(smem) + u32(1023)) & u32(0xFFFFFC00))
        bar = u32(base + 2 * BOX)
        tid = i32(cuda.threadIdx.x)
        batch = i32(cuda.blockIdx.x)
        if tid == 0:
            mbar_init(bar, u32(1))
            if not no_init_fence:
                mbar_init_fence()
        cuda.syncthreads()  # write-read: the mbarrier
        turn = i32(0)
        for head in range(heads):
            for box in range(row_boxes * column_boxes):
                x, y = i32(box % column_boxes) * 64, i32(box // column_boxes) * BOX_ROWS
                if tid == 0:
                    tma_prefetch_4d(X, x, y, head, batch)
                    mbar_expect(bar, u32(BOX))
                    tma_load_4d(base, X, x, y, head, batch, bar)
                    if not again:
                        wait_read()
                mbar_wait(bar, u32(turn & 1))
                if not no_barrier_after:
                    cuda.syncthreads()  # read-write: the second stage, which the last store read
                a, b, c, d = ld_shared_v4(u32(base + tid * 16))
                if fences_before:
                    fence_async()
                st_shared_v4(u32(base + BOX + tid * 16), a, b, c, d)
                if one_fences:
                    if tid == 0:
                        fence_async()
                elif not no_fence and not fences_before and not fences_late:
                    fence_async()
                if not no_barrier:
                    cuda.syncthreads()  # write-read: the second stage; read-write: the first
                if fences_late:
                    fence_async()
                if tid == 0:
                    stage = u32(base + BOX + off + far)
                    tma_store_4d(out if no_map else O, x, y, head, batch, stage)
                    if twice:
                        tma_store_4d(O, x, y, head, batch, stage)
                    if not not_committed:
                        bulk_commit()
                turn += i32(1)
        if tid == 0:
            if not no_end:
                wait_end()
            if out != u64(0):
                st_global_b32(out + u64(batch * 4), ld_global_b32(out + u64(batch * 4)))

    return kernel


def copied(fault="", *, X=None, O=None, out=None, copies="late", backwards=False):
    """Copy X to O; ``out`` is O by its address, in which block b touches element b afterwards."""
    X = (
        np.random.default_rng(0).standard_normal((1, 2, 40, 72)).astype(np.float16)
        if X is None
        else X
    )
    O = np.full(X.shape, np.nan, X.dtype) if O is None else O
    shape = (X.array if isinstance(X, Placed) else X).shape
    if fault == "read back too early":
        out = O
    report = emulate(
        copier(fault), shape[0], 128,
        [TensorMap(X, BOX_ROWS), TensorMap(O, BOX_ROWS), out, shape[1], -(-shape[2] // BOX_ROWS),
         -(-shape[3] // 64)],
        shared_bytes=2 * BOX + 8 + 1024, copies=copies, backwards=backwards,
    )  # fmt: skip
    return X, O, report


@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1, 16, 64), (2, 3, 17, 64), (1, 2, 40, 72), (2, 1, 1, 8), (1, 1, 15, 128)]
)
def test_boxes_go_there_and_back(shape, copies, backwards):
    X = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    X, O, report = copied(X=X, copies=copies, backwards=backwards)
    report.check()
    assert (O == X).all()
    batch, heads, n, d = shape
    boxes_ = batch * heads * -(-n // BOX_ROWS) * -(-d // 64)
    moved = report.tensors["X"], report.tensors["O"]
    assert [x.read_bytes for x in moved] == [X.nbytes, 0]
    assert [x.write_bytes for x in moved] == [0, X.nbytes]
    assert moved[0].read_sectors == boxes_ * BOX // 32  # whole boxes
    if d % 16 == 0:
        assert moved[1].write_sectors == X.nbytes // 32  # the tensor's own
    assert report.instructions["tma_store_4d"] == report.instructions["tma_prefetch_4d"] == boxes_


def test_boxes_of_views_and_of_distant_rows():
    wide = np.random.default_rng(0).standard_normal((2, 20, 3, 80)).astype(np.float32)
    X = wide.transpose(0, 2, 1, 3)[:, ::2, :, 8:72]  # (batch, rows, heads, columns) in memory
    big = np.full((2, 20, 2, 96), np.nan, np.float32)
    O = big[..., 16:80].transpose(0, 2, 1, 3)
    copied(X=X[..., :32], O=O[..., :32])[2].check()
    assert (O[..., :32] == X[..., :32]).all()
    assert np.isnan(big[..., :16]).all()
    assert np.isnan(big[..., 48:]).all()
    rows = np.random.default_rng(0).standard_normal((1, 2, 40, 64)).astype(np.float16)
    far = Placed(rows, (1 << 36, 1 << 35, 1 << 28, 1))
    near = np.zeros_like(rows)
    copied(X=far, O=near)[2].check()
    assert (near == rows).all()


def test_a_map_and_an_address_of_one_tensor_are_one_tensor():
    X = np.random.default_rng(0).standard_normal((1, 2, 16, 64)).astype(np.float16)
    O = np.zeros_like(X)
    _, _, report = copied(X=X, O=O, out=O[0])
    report.check()
    assert (O == X).all()
    assert set(report.tensors) == {"X", "out"}  # counted where it has its address
    assert report.tensors["out"].write_bytes == X.nbytes + 4
    _, _, report = copied(X=X, O=X.copy(), out=O[0])
    assert set(report.tensors) == {"X", "O", "out"}


@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("fault", COPY_FAULTS)
def test_every_planted_fault_of_a_copy_is_caught(fault, copies, backwards):
    _, _, report = copied(fault, copies=copies, backwards=backwards)
    assert report.faults, fault
    assert report.faults[0].kind in COPY_FAULTS[fault], report


def helpers(*, waits: bool):
    """A warp fills a place in each turn, one empties it, one only says that it may be filled."""

    def kernel(O):
        smem = cuda.shared.array(0, types.uint8)
        base = shared_address(smem)
        full, empty = base, u32(base + 8)
        tid = i32(cuda.threadIdx.x)
        warp = i32(shfl_idx(u32(tid >> 5), u32(0)))
        lane = i32(tid & 31)
        if tid == 0:
            mbar_init(full, u32(1))
            mbar_init(empty, u32(2))
            mbar_init_fence()
        cuda.syncthreads()  # write-read: the mbarriers
        if warp == 0:
            for turn in range(4):
                if turn > 0:
                    mbar_wait(empty, u32((turn - 1) & 1))  # read-write: the place
                if lane == 0:
                    st_shared_v4(u32(base + 16), u32(turn), u32(0), u32(0), u32(0))
                    mbar_arrive(full)
        if warp == 1:
            for turn in range(4):
                mbar_wait(full, u32(turn & 1))  # write-read: the place
                if lane == 0:
                    x, _, _, _ = ld_shared_v4(u32(base + 16))
                    st_global_b32(O + u64(turn * 4), x)
                    mbar_arrive(empty)
        if warp == 2:
            for turn in range(4):
                if waits:
                    mbar_wait(full, u32(turn & 1))  # else it may speak for an earlier turn
                if lane == 0:
                    mbar_arrive(empty)

    O = np.zeros(4, np.uint32)
    return emulate(kernel, 1, 96, (O,), shared_bytes=32), O


def test_an_arrival_may_not_count_for_an_earlier_phase():
    """Whether it did depends on the order of warps; that it may, does not."""
    report, O = helpers(waits=True)
    report.check()
    assert O.tolist() == [0, 1, 2, 3]
    report, _ = helpers(waits=False)
    assert any("may count for the phase before" in fault.detail for fault in report.faults)


def test_a_box_outside_the_tensor_is_zeros_and_stores_nothing():
    wait = bulk_wait(0)

    def kernel(X, O, seen):
        smem = cuda.shared.array(0, types.uint8)
        base = u32((shared_address(smem) + u32(1023)) & u32(0xFFFFFC00))
        lane = i32(cuda.threadIdx.x)
        bar = u32(base + 5 * 1024)
        if lane == 0:
            mbar_init(bar, u32(1))
            mbar_init_fence()
            mbar_expect(bar, u32(5 * 1024))
            tma_load_4d(base, X, i32(-60), i32(-6), i32(0), i32(0), bar)
            tma_load_4d(u32(base + 1024), X, i32(0), i32(0), i32(2), i32(0), bar)
            tma_load_4d(u32(base + 2048), X, i32(0), i32(0), i32(0), u32(-1), bar)
            tma_load_4d(u32(base + 3072), X, i32(64), i32(0), i32(0), i32(0), bar)
            tma_load_4d(u32(base + 4096), X, i32(0), i32(8), i32(0), i32(0), bar)
        cuda.syncwarp()
        mbar_wait(bar, u32(0))
        if lane == 0:
            tma_store_4d(O, i32(-56), i32(-6), i32(1), i32(0), base)
            tma_store_4d(O, i32(0), i32(0), i32(2), i32(0), base)
            bulk_commit()
            wait()
        for i in range(10):
            a, b, c, d = ld_shared_v4(u32(base + i * 512 + lane * 16))
            st_global_v4(seen + u64(i * 512 + lane * 16), a, b, c, d)

    X, O, seen = (np.zeros(shape, np.float16) for shape in ((1, 2, 8, 64), (1, 2, 8, 64), (5, 512)))
    X += 1
    arguments = [TensorMap(X, 8), TensorMap(O, 8), seen]
    report = emulate(kernel, 1, 32, arguments, shared_bytes=6 * 1024 + 8).check()
    assert seen.sum(axis=1).tolist() == [2 * 4, 0, 0, 0, 0]
    assert (O[0, 1, :2, 4:8] == 1).all()
    assert O.sum() == 2 * 4
    assert report.tensors["X"].read_bytes == 2 * 4 * 2
    assert report.tensors["O"].write_bytes == 2 * 8 * 2


@pytest.mark.parametrize(
    ("array", "rows", "message"),
    [
        (np.zeros(64, np.float16), 8, r"X: no tensor map of shape \(64,\)"),
        (np.zeros((1, 1, 0, 64), np.float16), 8, r"X: no tensor map of shape \(1, 1, 0, 64\)"),
        (np.zeros((1, 1, 8, 60), np.float16), 8, "X: no tensor map of strides"),
        (np.zeros((1, 1, 8, 64), np.float16), 257, "X: boxes of 257 rows"),
        (np.zeros((1, 1, 8, 128), np.float16)[..., ::2], 8, "X: last axis has stride 2"),
    ],
)
def test_tensor_maps_that_the_driver_refuses(array, rows, message):
    with pytest.raises(ValueError, match=message):
        emulate(copier(), 1, 128, [TensorMap(array, rows), None, None, 1, 1, 1])


def test_a_box_needs_as_many_coordinates_as_the_tensor_has_axes():
    X = np.zeros((2, 40, 64), np.float16)
    report = emulate(
        copier(), 1, 128, [TensorMap(X, 16), TensorMap(X.copy(), 16), None, 1, 1, 1],
        shared_bytes=2 * BOX + 1032,
    )  # fmt: skip
    assert report.faults[0].detail == "4 coordinates for X of 3 axes"


# ---- products of what threads wrote; registers ---------------------------------------------------

REGISTER_FAULTS = {
    "no fence_async": "fence",
    "no wgmma_fence": "fence",
    "sums touched after the fence": "fence",
    "sums read after the fence": "fence",
    "operands touched after the fence": "fence",
    "a warp stays away": "divergence",
    "product not awaited": "in flight",
}


def multiplied(fault: str = ""):
    """C [64, 64] = 2 A B^T of ones: A in registers, B [64, 16] written by threads; done twice."""
    multiply = wgmma(64, "f16", a_in_registers=True, b_transposed=False)
    wait, matrix = wgmma_wait(0, 32), descriptor(16, 1024)
    no_async, no_fence = fault == "no fence_async", fault == "no wgmma_fence"
    sums, read = fault == "sums touched after the fence", fault == "sums read after the fence"
    operands, away = fault == "operands touched after the fence", fault == "a warp stays away"
    no_wait = fault == "product not awaited"
    ZERO, ONE = np.float32(0), np.float32(1)

    def kernel(C):
        smem = cuda.shared.array(0, types.uint8)
        base = u32((shared_address(smem) + u32(1023)) & u32(0xFFFFFC00))
        acc = cuda.local.array(32, types.float32)
        a = cuda.local.array(4, types.uint32)
        tid = i32(cuda.threadIdx.x)
        ones = pack_f16(ONE, ONE)
        for i in range(4):
            st_shared_v4(u32(base + i * 2048 + tid * 16), ones, ones, ones, ones)
            a[i] = pack_f16(ONE, ONE)
        if not no_async:
            fence_async()
        cuda.syncthreads()  # write-read: B
        for i in range(32):
            acc[i] = ZERO
        for turn in range(2):
            if not no_fence:
                wgmma_fence()
            if sums:
                acc[3] = ZERO
            if read and acc[3] > 100:
                C = u64(0)
            if operands:
                a[2] = pack_f16(ONE, ONE)
            if not away or tid < 96:
                multiply(acc, a[0], a[1], a[2], a[3], matrix(base), u32(turn))
            wgmma_commit()
            if not no_wait or turn == 0:
                wait(acc)
        if not no_wait:
            for i in range(32):
                st_global_f32(C + u64((i * 128 + tid) * 4), acc[i])
        unroll_loops()

    return kernel


@pytest.mark.parametrize("copies", ["early", "late"])
def test_products_of_registers_and_of_what_threads_wrote(copies):
    C = np.zeros((32, 128), np.float32)
    emulate(multiplied(), 1, 128, [C], shared_bytes=9216, copies=copies).check()
    assert (C == 32).all()


@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("fault", REGISTER_FAULTS)
def test_every_planted_fault_of_a_product_is_caught(fault, copies):
    C = np.zeros((32, 128), np.float32)
    report = emulate(multiplied(fault), 1, 128, [C], shared_bytes=9216, copies=copies)
    assert report.faults, fault
    assert report.kinds() == {REGISTER_FAULTS[fault]}, report


POOL = {  # registers at launch, given back, taken, warps that take: kind of fault, if any
    "fits": (168, 40, 232, 4, None),
    "fits exactly": (136, 24, 248, 4, None),
    "nobody counts": (None, 232, 240, 4, None),
    "more than were given back": (168, 144, 240, 4, "deadlock"),
    "gives back what it lacks": (168, 200, 168, 4, "registers"),
    "takes fewer than it has": (168, 40, 160, 4, "registers"),
    "a warp stays away": (168, 40, 232, 3, "divergence"),
}


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("case", POOL)
def test_registers_are_given_back_before_they_are_taken(case, backwards):
    launch, fewer, more, warps, kind = POOL[case]
    give, take = setmaxnreg("dec", fewer), setmaxnreg("inc", more)

    def kernel():
        tid = i32(cuda.threadIdx.x)
        if tid < 128:
            give()
        elif tid < 128 + 32 * warps:
            take()

    report = emulate(kernel, 1, 256, [], backwards=backwards, registers=launch)
    assert report.kinds() == ({kind} if kind else set()), report


def test_setmaxnreg_takes_steps_of_eight():
    for kind, registers in (("inc", 100), ("dec", 16), ("inc", 264), ("more", 64)):
        with pytest.raises(ValueError, match=f"setmaxnreg: {kind} {registers}"):
            setmaxnreg(kind, registers)


@pytest.mark.skipif(not toolkit.is_here(), reason="needs the CUDA compiler (extra: cu13)")
def test_numba_compiles_the_kernel_for_sm_90a():
    text, _ = cuda.compile(
        product(), types.void(types.uint64, types.uint64, types.uint64, types.int64), device=False,
        abi="numba", cc=(9, 0, "a"), output="ptx", launch_bounds=(THREADS, 1),
    )  # fmt: skip
    products = len(re.findall(r"wgmma\.mma_async\S*m64n64k16", text))
    assert products >= 4 and products % 4 == 0  # noqa: PT018  # turns of the loop are copied
    assert "cp.async.bulk.tensor.3d" in text
    assert "mbarrier.try_wait.parity" in text
    assert ".local" not in text
