"""Write a tensor-core kernel without a GPU: run it, profile it, break it.

Run: python examples/emulate_kernel.py. Read next: kernels/EMULATOR.md.

C = A B^T, one warp: A [16, 16] and B [8, 16] float16 come by asynchronous copies, rows of two
16-byte chunks; ldmatrix gives each lane its share of them, mma multiplies.
"""

import numpy as np

from kernels._cuda import cuda, types
from kernels.emulator import emulate
from kernels.ptx import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait_0,
    i32,
    ldmatrix_x4,
    mma_f16,
    shared_address,
    st_global_f32,
    u32,
    u64,
)


def product(waits: bool, swizzle: int):
    """The kernel; without ``waits`` it is wrong, without ``swizzle`` = 1 slow."""
    ZERO = np.float32(0)

    def kernel(A, B, C):
        base = shared_address(cuda.shared.array(0, types.uint8))  # A, then B
        lane = i32(cuda.threadIdx.x)
        row, chunk = lane >> 1, lane & 1
        place = row * 32 + ((chunk ^ ((row >> 2) & swizzle)) << 4)
        cp_async_16(u32(base + place), A + u64(row * 32 + chunk * 16), u32(16))
        if row < 8:
            cp_async_16(u32(base + 512 + place), B + u64(row * 32 + chunk * 16), u32(16))
        cp_async_commit()
        if waits:
            cp_async_wait_0()
        cuda.syncwarp()  # write-read: rows that other lanes copied

        row = lane & 15
        place = row * 32 + (((lane >> 4) ^ ((row >> 2) & swizzle)) << 4)
        a0, a1, a2, a3 = ldmatrix_x4(u32(base + place))
        row, chunk = lane & 7, (lane >> 3) & 1  # two matrices of B, each twice
        b0, b1, _, _ = ldmatrix_x4(
            u32(base + 512 + row * 32 + ((chunk ^ ((row >> 2) & swizzle)) << 4))
        )
        c = mma_f16(a0, a1, a2, a3, b0, b1, ZERO, ZERO, ZERO, ZERO)
        at = C + u64((lane >> 2) * 32 + (lane & 3) * 8)  # row g, column 2t
        st_global_f32(at, c[0])
        st_global_f32(at + u64(4), c[1])
        st_global_f32(at + u64(256), c[2])
        st_global_f32(at + u64(260), c[3])

    return kernel


def main() -> None:
    rng = np.random.default_rng(0)
    A, B = (rng.standard_normal((rows, 16)).astype(np.float16) for rows in (16, 8))
    right = A.astype(np.float64) @ B.T.astype(np.float64)
    for title, waits, swizzle in (
        ("right", True, 1), ("without a swizzle", True, 0), ("without the wait", False, 1),
    ):  # fmt: skip
        C = np.zeros((16, 8), np.float32)
        report = emulate(product(waits, swizzle), 1, 32, [A, B, C], shared_bytes=768)
        error = np.abs(C - right).max()
        print(f"== {title}: {'right' if error < 1e-3 else 'wrong'} values")
        print(report)


if __name__ == "__main__":
    main()
