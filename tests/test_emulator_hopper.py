"""Tensor copies, mbarriers and warpgroup products under the emulator, right and with faults."""

from __future__ import annotations

import re

import numpy as np
import pytest
import toolkit

pytest.importorskip("numba_cuda", reason="kernels are written against numba.cuda")

from kernels._cuda import SIMULATOR, cuda, types
from kernels.emulator import TensorMap, emulate
from kernels.ptx import i32, shared_address, shfl_idx, st_global_f32, u32, u64, unroll_loops
from kernels.ptx_hopper import (
    descriptor,
    mbar_arrive,
    mbar_expect,
    mbar_init,
    mbar_init_fence,
    mbar_wait,
    tma_load_3d,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)

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


@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_caught(fault, copies):
    _, _, report = run(fault, copies=copies)
    assert report.faults, fault
    assert report.faults[0].kind in FAULTS[fault], report


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
