"""A small kernel, C = A B^T by tiles through shared memory, and the same with a fault planted.

A [32, 16 T] and B [16, 16 T] float16, C [32, 16] float32; two warps, one block. Tile t holds
columns 16 t .. 16 t + 15 of A and of B, 48 rows of two 16-byte chunks; two stages, the next tile
on its way while one is used. Every fault is a word of `FAULTS`; the right kernel is ``fault=""``.
"""

from __future__ import annotations

import numpy as np

from kernels._cuda import cuda, types
from kernels.ptx import (
    bar_sync,
    cp_async_16,
    cp_async_commit,
    cp_async_wait_0,
    i32,
    ld_global_v4,
    ldmatrix_x4,
    mma_f16,
    shared_address,
    shfl_xor,
    st_global_f32,
    st_shared_b32,
    st_shared_v4,
    u32,
    u64,
)

ROWS, THREADS = 48, 64
STAGE = ROWS * 32
SHARED_BYTES = 2 * STAGE
ZERO = np.float32(0)

FAULTS = {  # what is planted: what the emulator calls it
    "no wait": {"in flight"},
    "no barrier after the wait": {"race"},
    "next copy before the barrier": {"race"},
    "one tile too many": {"bounds"},
    "one row too many": {"bounds"},
    "stage past the end": {"bounds"},
    "misaligned source": {"alignment"},
    "misaligned shared": {"alignment"},
    "lanes left out": {"divergence"},
    "barrier for one warp": {"deadlock"},
    "barrier in a branch": {"divergence", "deadlock"},
    "two writers": {"race"},
    "first tile never copied": {"uninitialised"},
    "32-bit address": {"bounds"},
}
QUIET = ("wrong swizzle", "no swizzle")  # no rule is broken: wrong values; bank conflicts


def product(fault: str):
    no_wait = fault == "no wait"
    no_barrier = fault == "no barrier after the wait"
    early_copy = fault == "next copy before the barrier"
    extra_tile = fault == "one tile too many"
    extra_row = fault == "one row too many"
    past = 2 * STAGE if fault == "stage past the end" else STAGE
    off_global = 8 if fault == "misaligned source" else 0
    off_shared = 4 if fault == "misaligned shared" else 0
    left_out = fault == "lanes left out"
    one_warp = fault == "barrier for one warp"
    in_branch = fault == "barrier in a branch"
    two_writers = fault == "two writers"
    no_first = fault == "first tile never copied"
    narrow = fault == "32-bit address"
    load_mask = 0 if fault in QUIET else 1
    read_mask = 0 if fault == "no swizzle" else 1

    def kernel(A, B, C, tiles, pitch):
        smem = cuda.shared.array(0, types.uint8)
        base = shared_address(smem)
        acc = cuda.local.array(8, types.float32)
        tid = i32(cuda.threadIdx.x)
        warp, lane = tid >> 5, tid & 31
        for c in range(8):
            acc[c] = ZERO

        def begin(t):
            stage = base + u32((t & 1) * past)
            for i in range(2):
                row, chunk = (tid >> 1) + 32 * i, tid & 1
                if row < ROWS + (1 if extra_row else 0):
                    source = A + u64(row * pitch) if row < 32 else B + u64((row - 32) * pitch)
                    if narrow:
                        source = u64(u32(source))
                    place = (chunk ^ ((row >> 2) & load_mask)) << 4
                    cp_async_16(
                        u32(stage + row * 32 + place + off_shared),
                        source + u64(t * 32 + chunk * 16 + off_global), u32(16),
                    )  # fmt: skip
            cp_async_commit()

        if not no_first:
            begin(0)
        for t in range(tiles):
            if early_copy and t + 1 < tiles:
                begin(t + 1)
            if not no_wait:
                cp_async_wait_0()
            if not no_barrier:
                cuda.syncthreads()  # write-read: tile t. read-write: the stage of the tile before
            if not early_copy and t + 1 < tiles + (1 if extra_tile else 0):
                begin(t + 1)

            stage = base + u32((t & 1) * STAGE)
            r = warp * 16 + (lane & 15)
            place = ((lane >> 4) ^ ((r >> 2) & read_mask)) << 4
            if left_out:
                if lane < 31:
                    a0, a1, a2, a3 = ldmatrix_x4(u32(stage + r * 32 + place))
            else:
                a0, a1, a2, a3 = ldmatrix_x4(u32(stage + r * 32 + place))
            r = 32 + (lane & 7) + ((lane >> 4) << 3)
            place = (((lane >> 3) & 1) ^ ((r >> 2) & read_mask)) << 4
            b0, b1, b2, b3 = ldmatrix_x4(u32(stage + r * 32 + place))
            acc[0], acc[1], acc[2], acc[3] = mma_f16(
                a0, a1, a2, a3, b0, b1, acc[0], acc[1], acc[2], acc[3]
            )
            acc[4], acc[5], acc[6], acc[7] = mma_f16(
                a0, a1, a2, a3, b2, b3, acc[4], acc[5], acc[6], acc[7]
            )

        if one_warp and warp == 0:
            bar_sync(u32(1), u32(THREADS))
        if in_branch and lane < 16:
            cuda.syncthreads()
        if two_writers:
            st_shared_b32(u32(base + (lane >> 1) * 4 + warp * 128), u32(lane))
        for j in range(2):
            for c in range(4):
                row = warp * 16 + (lane >> 2) + 8 * (c >> 1)
                column = 8 * j + (lane & 3) * 2 + (c & 1)
                st_global_f32(C + u64((row * 16 + column) * 4), acc[4 * j + c])

    return kernel


def transposer(syncs: bool):
    """A warp writes rows of 16 bytes and reads what other lanes wrote."""

    def kernel(x, y):
        smem = cuda.shared.array(0, types.uint8)
        base = shared_address(smem)
        lane = i32(cuda.threadIdx.x)
        a, b, c, d = ld_global_v4(x + u64(lane * 16))
        st_shared_v4(u32(base + lane * 16), a, b, c, d)
        if syncs:
            cuda.syncwarp()  # write-read: rows of other lanes
        m0, _m1, _m2, _m3 = ldmatrix_x4(u32(base + (31 - lane) * 16))
        st_global_f32(y + u64(lane * 4), shfl_xor(np.float32(1) * m0, u32(1)))

    return kernel
