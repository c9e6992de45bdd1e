"""The words of the Hopper kernel: begin a product, weigh, hide, store.

Each is a device function that is inlined where it is used. Those that begin or await a product are
for a whole warpgroup, the others for a warp; none waits for other warps, so every barrier is
visible in the kernel. ``words`` binds them to a layout and a storage type.

A lane's S is the order of wgmma's sums, which is mma's C tile by tile: ``S[4 j + 2 h + c]`` is row
g + 8 h of the warp's 16, column 8 j + 2 t + c, with g = lane // 4 and t = lane % 4; acc likewise.
P packs neighbours of a row, ``P[2 j + h]``: four of its registers are mma's A for 16 keys, so that
P goes from the sums of one product to the operand of the next without leaving its thread.
m, l and whatever else belongs to rows have two values a lane, h = 0 and 1.

m is in base 2: P = 2**(S c - m) with c = scale log2(e). A row that has seen nothing has m = LOWEST,
which is finite: S = -inf gives P = 0, and a first score of usual size an infinite one, if m is not
raised.

Read next: HOPPER.md, why the kernel is as it is.
"""

from __future__ import annotations

from types import SimpleNamespace

from ._cuda import word
from .mma_tiles import ARITHMETIC, INF, LOG2E, LOWEST, ONE, SMALLEST, ZERO, exactly_by
from .ptx import (
    anew,
    bit_mask,
    bits_float,
    ex2,
    fadd,
    float_bits,
    fma,
    fma_bf16x2,
    fma_f16x2,
    fmax,
    fmul,
    i32,
    ld_global_b16,
    ldmatrix_x4,
    shfl_xor,
    st_global_b16,
    stmatrix_x4,
    u32,
    unroll_loops,
)
from .ptx_hopper import (
    descriptor_of_chunk,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from .sm90_layout import ROW_BYTES, WARP_ROWS, Sm90Layout

SHORT = {"float16": ("f16", fma_f16x2), "bfloat16": ("bf16", fma_bf16x2)}


def words(layout: Sm90Layout, dtype: str) -> SimpleNamespace:
    """The device functions for one layout and one storage type."""
    mma, pack, widen = ARITHMETIC[dtype]
    short, fma_x2 = SHORT[dtype]
    Bc, NT, ET = layout.block_k, layout.block_k // 8, layout.e // 8  # NT, ET: column tiles
    KT, PT = layout.d // 16, layout.block_k // 16  # products of S = Q K^T and of acc += P V
    STEP = 32 >> 4  # chunks of 16 columns of Q and K; 16 rows of V are 2048 bytes
    Q_BLOCK, K_BLOCK = layout.block_q * ROW_BYTES, Bc * ROW_BYTES  # bytes of a column block
    WARP_BLOCK, OB = WARP_ROWS * ROW_BYTES, layout.O_blocks
    rows, columns = descriptor_of_chunk(16, 1024), descriptor_of_chunk(K_BLOCK, 1024)
    product_QK = wgmma(Bc, short, a_in_registers=False, b_transposed=False)
    product_PV = wgmma(layout.e, short, a_in_registers=True, b_transposed=True)

    # ---- products

    @word
    def begin_scores(S, Q, K):
        """S = Q K^T, 16 columns of Q and K a product; Q and K in chunks of shared memory."""
        for i in range(4 * NT):
            S[i] = ZERO
        wgmma_fence()
        for k in range(KT):
            step = STEP * (k % 4)
            product_QK(
                S, rows(u32(Q + (k // 4 * (Q_BLOCK >> 4) + step))),
                rows(u32(K + (k // 4 * (K_BLOCK >> 4) + step))), 1 if k > 0 else 0,
            )  # fmt: skip
        wgmma_commit()
        unroll_loops()

    @word
    def begin_output(acc, P, V):
        """acc += P V, 16 keys a product."""
        wgmma_fence()
        for k in range(PT):
            product_PV(
                acc, P[4 * k], P[4 * k + 1], P[4 * k + 2], P[4 * k + 3],
                columns(u32(V + k * (2048 >> 4))), 1,
            )  # fmt: skip
        wgmma_commit()
        unroll_loops()

    @word
    def scores_again(S, Q, K, lane):
        """S = Q K^T of one warp, by mma.sync: wgmma needs four. Q and K are addresses."""
        for i in range(4 * NT):
            S[i] = ZERO
        lane = i32(anew(u32(lane)))
        row, half, quarter = i32(lane & 7), i32(lane >> 4), i32((lane >> 3) & 1)
        Q_row = u32(Q + (lane & 15) * ROW_BYTES)
        K_row = u32(K + (row + 8 * half) * ROW_BYTES)
        k = i32(0)
        steps = i32(anew(u32(KT)))  # as one loop, which is small: it runs seldom
        while k < steps:
            chunk, block = i32((k & 3) * 2), i32(k >> 2)
            Q_at = u32(Q_row + block * Q_BLOCK + (((chunk + half) ^ row) << 4))
            K_at = u32(K_row + block * K_BLOCK + (((chunk + quarter) ^ row) << 4))
            a0, a1, a2, a3 = ldmatrix_x4(Q_at)
            for j in range(0, NT, 2):
                b0, b1, b2, b3 = ldmatrix_x4(u32(K_at + j * 8 * ROW_BYTES))
                S[4 * j], S[4 * j + 1], S[4 * j + 2], S[4 * j + 3] = mma(
                    a0, a1, a2, a3, b0, b1, S[4 * j], S[4 * j + 1], S[4 * j + 2], S[4 * j + 3]
                )
                S[4 * j + 4], S[4 * j + 5], S[4 * j + 6], S[4 * j + 7] = mma(
                    a0, a1, a2, a3, b2, b3, S[4 * j + 4], S[4 * j + 5], S[4 * j + 6], S[4 * j + 7]
                )
            k = i32(k + 1)
        unroll_loops()

    # ---- softmax

    @word
    def reset(m, l):
        """Rows that have seen nothing."""
        for h in range(2):
            m[h] = LOWEST
            l[h] = ZERO
        unroll_loops()

    @word
    def clear(acc):
        for i in range(4 * ET):
            acc[i] = ZERO
        unroll_loops()

    @word
    def factor_for(S, scale):
        """The factor that takes S to m's units; 1 if it is applied here, lest -inf meets it."""
        scale = bits_float(anew(float_bits(scale)))
        c = fmul(scale, LOG2E)
        if c >= SMALLEST:
            return c
        for i in range(4 * NT):
            S[i] = fmul(fmul(S[i], scale), LOG2E)
        unroll_loops()
        return ONE

    @word
    def hide(S, first, last, keys, row, column):
        """Hidden pairs become -inf. Row r sees keys first + r .. last + r of the tile's ``keys``.

        Of a lane's columns, those before x are 2 (x // 8) + min(x mod 8, 2), if it counts x from
        its own first one. Hence a bit each, and a mask of ones for those that are visible.
        """
        for h in range(2):
            low = max(i32(0), i32(first + row + 8 * h - column))
            end = max(low, i32(min(i32(last + row + 8 * h + 1), keys) - column))
            before = i32(2 * (low >> 3) + min(i32(low & 7), i32(2)))
            count = i32(2 * (end >> 3) + min(i32(end & 7), i32(2)) - before)
            bits = bit_mask(u32(before), u32(count))
            for j in range(NT):
                for c in range(2):
                    if bits & u32(1 << (2 * j + c)) == 0:
                        S[4 * j + 2 * h + c] = -INF
        unroll_loops()

    @word
    def weigh(S, m, l, shrink, factor):
        """The online softmax: new m, P = 2**(S factor - m) in S's place, l.

        ``shrink`` is what the rows of acc are to be multiplied with. l stays this lane's part of
        the sum; m is the same in a row's four lanes.
        """
        for h in range(2):
            even, odd = S[2 * h], S[2 * h + 1]  # chains: a maximum waits for the one before it
            for j in range(1, NT):
                even = fmax(even, S[4 * j + 2 * h])
                odd = fmax(odd, S[4 * j + 2 * h + 1])
            top = fmax(even, odd)
            top = fmax(top, shfl_xor(top, 1))
            top = fmax(top, shfl_xor(top, 2))
            m_new = fmax(m[h], fmul(top, factor))
            shrink[h] = ex2(fadd(m[h], -m_new))
            m[h] = m_new
            l[h] = fmul(l[h], shrink[h])
        for h in range(2):
            even, odd = l[h], ZERO
            for j in range(NT):
                x = ex2(fma(S[4 * j + 2 * h], factor, -m[h]))
                y = ex2(fma(S[4 * j + 2 * h + 1], factor, -m[h]))
                S[4 * j + 2 * h] = x
                S[4 * j + 2 * h + 1] = y
                even = fadd(even, x)
                odd = fadd(odd, y)
            l[h] = fadd(even, odd)
        unroll_loops()

    @word
    def look(S, m, l, shrink, row, key, n, s, left, right, scale, lane):
        """Hide what the warp's rows do not see of the tile, which begin at row and key; weigh."""
        factor = factor_for(S, scale)
        from_key, to_key = i32(row + s - n - left - key), i32(row + s - n + right - key)
        keys = i32(s - key)
        if keys < Bc or from_key > 1 - WARP_ROWS or to_key < Bc - 1:
            lane = i32(anew(u32(lane)))
            hide(S, from_key, to_key, keys, i32(lane >> 2), i32(2 * (lane & 3)))
        weigh(S, m, l, shrink, factor)

    @word
    def exponentials(S, sums, first, end, m0, m1, c):
        """P = 2**(S c - m) in S's place, column tiles first .. end - 1, and four chains of sums."""
        for j in range(first, end):
            for h in range(2):
                m = m1 if h else m0
                x = ex2(fma(S[4 * j + 2 * h], c, -m))
                y = ex2(fma(S[4 * j + 2 * h + 1], c, -m))
                S[4 * j + 2 * h] = x
                S[4 * j + 2 * h + 1] = y
                sums[2 * h] = fadd(sums[2 * h], x)
                sums[2 * h + 1] = fadd(sums[2 * h + 1], y)
        unroll_loops()

    @word
    def round_P(P, S):
        """P as an operand."""
        for i in range(2 * NT):
            P[i] = pack(S[2 * i], S[2 * i + 1])
        unroll_loops()

    @word
    def rescale(acc, shrink):
        for j in range(ET):
            for h in range(2):
                acc[4 * j + 2 * h] *= shrink[h]
                acc[4 * j + 2 * h + 1] *= shrink[h]
        unroll_loops()

    # ---- output

    @word
    def stage_rows(acc, inverse0, inverse1, staging, first, lane):
        """O = acc / l, rounded, of ``OB`` column blocks; not 0 if one is NaN or infinite."""
        row = i32(lane & 15)
        even, odd = u32(0), u32(0)  # x * 0 is NaN
        for j in range(4 * OB):  # pairs of column tiles
            if 8 * first + 2 * j < ET:
                i = 32 * first + 8 * j
                x0 = pack(acc[i] * inverse0, acc[i + 1] * inverse0)
                x1 = pack(acc[i + 2] * inverse1, acc[i + 3] * inverse1)
                x2 = pack(acc[i + 4] * inverse0, acc[i + 5] * inverse0)
                x3 = pack(acc[i + 6] * inverse1, acc[i + 7] * inverse1)
                chunk = i32((2 * (j % 4) + (lane >> 4)) ^ (lane & 7))
                at = u32(staging + j // 4 * WARP_BLOCK + row * ROW_BYTES + (chunk << 4))
                stmatrix_x4(at, x0, x1, x2, x3)
                even = fma_x2(x0, 0, even)
                odd = fma_x2(x1, 0, odd)
                even = fma_x2(x2, 0, even)
                odd = fma_x2(x3, 0, odd)
        unroll_loops()
        return u32((even | odd) & 0x7FFF7FFF)

    def load(address):
        return widen(ld_global_b16(address))

    def save(address, x):
        st_global_b16(address, pack(x, ZERO))

    return SimpleNamespace(
        begin_scores=begin_scores, begin_output=begin_output, scores_again=scores_again,
        wait_first_S=wgmma_wait(0, 4 * NT), wait_S=wgmma_wait(1, 4 * NT),
        wait_acc=wgmma_wait(0, 4 * ET), reset=reset, clear=clear, factor_for=factor_for, look=look,
        weigh=weigh, exponentials=exponentials, round_P=round_P, rescale=rescale,
        stage_rows=stage_rows, exactly=exactly_by(layout, word(load), word(save)),
    )  # fmt: skip
