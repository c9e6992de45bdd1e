"""The words of the tensor-core kernel: fetch, score, hide, weigh, accumulate, store.

Each is a device function that a warp's lanes run together, for that warp's rows. None of them
waits for other warps, so every barrier is visible in the kernel. ``words`` binds them to a layout
and a storage type; two of them differ between 16-bit types and float32.

``S[i, j, c]`` of a lane is mma's C: row 16 i + g (+ 8 if c >= 2), column 8 j + 2 t + (c & 1), with
g = lane // 4 and t = lane % 4. Read next: ``flash_mma.py``, where the words make a kernel.

**float32 by TF32.** x = big + small, each TF32: big is x rounded to nearest, so that the rest has a
sign and 12 bits, of which mma drops the last. A product is small big + big small + big big; small
small is below float32's last bit. Tensor cores truncate their sums (`tensor_core.py`), which over
hundreds of keys is a bias: so a chain of few steps begins at zero there, its small products first,
and is added to the others outside, where sums are rounded to nearest. That is the cure of Ootomo
and Yokota (arXiv 2203.03341).
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np

from ._cuda import cuda, types, word
from .mma_layout import CHUNK_BYTES, MmaLayout, Swizzle
from .ptx import (
    anew,
    ballot,
    bits_float,
    cp_async_16,
    ex2,
    fadd,
    float_bits,
    fma,
    fmax,
    fmul,
    i32,
    ld_global_b16,
    ld_global_b32,
    ld_shared_v4,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    lg2,
    lost_tf32,
    mma_bf16,
    mma_f16,
    mma_tf32,
    pack_bf16,
    pack_f16,
    shfl_xor,
    split_tf32,
    st_global_b16,
    st_global_b32,
    st_global_f32,
    st_global_v4,
    st_shared_b32,
    u32,
    u64,
    unroll_loops,
    widen_bf16,
    widen_f16,
)

ZERO, HALF, ONE, INF = np.float32(0), np.float32(0.5), np.float32(1), np.float32(np.inf)
NAN = np.float32(np.nan)
SMALLEST = np.float32(2.0**-126)  # below it float32 products are flushed to 0
LOWEST = np.float32(np.finfo(np.float32).min)  # m of a row that has seen nothing
LIMIT = np.float32(4096)  # of a lane's sum in a row of a tile: P is finite in float16
LOG2E, LN2 = np.float32(math.log2(math.e)), np.float32(math.log(2))
ARITHMETIC = {
    "float16": (mma_f16, pack_f16, widen_f16),
    "bfloat16": (mma_bf16, pack_bf16, widen_bf16),
}


@word
def quotient(x, y):
    """x // y of numbers that are not negative, in 32 bits: Numba's own takes 64."""
    return i32(u32(x) // u32(y))


@word
def vanished(m, l):
    """Whether the weights of a row that sees something are too small.

    The largest should be 1. But m is rounded, if it is large by whole octaves, and S c - m is not.
    """
    return m > LOWEST and l < HALF


@word
def log_sum(m, l):
    """L, the natural logarithm of a row's sum, from m and l in base 2; -inf if it saw nothing."""
    return -INF if l == ZERO else fmul(fadd(m, lg2(l)), LN2)


def fetcher(layout: MmaLayout, tile_rows: int, width: int, swizzle: Swizzle):
    """``fetch`` and ``start`` for one buffer: neighbouring threads take neighbouring chunks."""
    CHUNK, CHUNKS = layout.chunk, width // layout.chunk
    ACROSS = max(1 << (CHUNKS - 1).bit_length(), layout.threads // tile_rows)  # threads a row
    DOWN = layout.threads // ACROSS  # rows at a time
    TIMES, PITCH = tile_rows // DOWN, CHUNK_BYTES * swizzle.chunks
    SHIFT, MASK = swizzle.shift, swizzle.mask

    @word
    def start(row_bytes, tid):
        """From a tile's first byte to the first that this thread copies."""
        thread = u32(tid)
        return u64(thread // u32(ACROSS)) * row_bytes + u64(thread % u32(ACROSS)) * u64(CHUNK_BYTES)

    @word
    def fetch(buffer, source, row_bytes, rows, width, tid):
        """Begin to copy ``rows`` x ``width`` of global memory; zeros fill the rest of the buffer.

        ``source`` is this thread's, see ``start``. What is past the tensor is not read.
        """
        thread = u32(tid)
        chunk, first = i32(thread % u32(ACROSS)), i32(thread // u32(ACROSS))
        inside = i32(chunk * CHUNK) < width
        if chunk < CHUNKS:
            for i in range(TIMES):
                r = i32(first + i * DOWN)
                place = i32((chunk ^ ((r >> SHIFT) & MASK)) << 4)
                size = u32(16) if r < rows and inside else u32(0)
                cp_async_16(u32(buffer + r * PITCH + place), source, size)
                source += u64(DOWN) * row_bytes
        unroll_loops()

    return fetch, start


def matrices_of_scores(layout: MmaLayout):
    """Where a lane's rows of Q's and K's first matrices begin, and the places of their chunks.

    Chunk 2k + i of a row is at place 2k ^ (i ^ x): a step k changes but the XOR. Rows of the later
    matrices are multiples of 8 away, which leaves x as it is.
    """
    Q_PITCH, K_PITCH = (CHUNK_BYTES * x.chunks for x in (layout.Q_swizzle, layout.K_swizzle))
    QS, QM = layout.Q_swizzle.shift, layout.Q_swizzle.mask
    KS, KM = layout.K_swizzle.shift, layout.K_swizzle.mask

    @word
    def rows_and_places(Q_buffer, K_buffer, lane):
        row, half, quarter = i32(lane & 7), i32(lane >> 4), i32((lane >> 3) & 1)
        return (
            u32(Q_buffer + (lane & 15) * Q_PITCH), i32((half ^ ((row >> QS) & QM)) << 4),
            u32(K_buffer + (row + 8 * half) * K_PITCH), i32((quarter ^ ((row >> KS) & KM)) << 4),
        )  # fmt: skip

    return rows_and_places


def words(layout: MmaLayout, dtype: str) -> SimpleNamespace:
    """The device functions for one layout and one storage type."""
    MT, Bc = layout.row_tiles, layout.block_k
    NT, ET = Bc // 8, layout.e // 8  # column tiles of S and of O
    RAW = dtype == "float32"
    fetch_Q, start_Q = fetcher(layout, layout.block_q, layout.d, layout.Q_swizzle)
    fetch_K, start_K = fetcher(layout, Bc, layout.d, layout.K_swizzle)
    fetch_V, start_V = fetch_K, start_K
    if (layout.e, layout.V_swizzle) != (layout.d, layout.K_swizzle):
        fetch_V, start_V = fetcher(layout, Bc, layout.e, layout.V_swizzle)

    @word
    def reset(m, l, acc):
        """Rows that have seen nothing: m = LOWEST, l = 0, acc = 0."""
        for i in range(MT):
            for h in range(2):
                m[i, h] = LOWEST
                l[i, h] = ZERO
            for j in range(ET):
                for c in range(4):
                    acc[i, j, c] = ZERO
        unroll_loops()

    @word
    def scale_first(S, scale):
        """S in units of m already: for a scale that must not meet the -inf of hidden pairs."""
        for i in range(MT):
            for j in range(NT):
                for c in range(4):
                    S[i, j, c] = fmul(fmul(S[i, j, c], scale), LOG2E)
        unroll_loops()

    @word
    def hide(S, first, last, keys, row, column):
        """Hidden pairs become -inf. Row r of the Q tile sees keys first + r .. last + r."""
        for i in range(MT):
            for h in range(2):
                r = row + 16 * i + 8 * h
                low = i32(first + r - column)  # counted from this lane's first column
                high = i32(min(i32(last + r), i32(keys - 1)) - column)
                for j in range(NT):
                    for u in range(2):
                        if 8 * j + u < low or 8 * j + u > high:
                            S[i, j, 2 * h + u] = -INF
        unroll_loops()

    @word
    def raise_maxima(m, l, acc, S, factor):
        """m of all that was seen and of this tile, l and acc rescaled; m is one in a row's lanes.

        float32 keeps m in units of S: then the largest weight is 1 to the last bit.
        """
        for i in range(MT):
            for h in range(2):
                top = S[i, 0, 2 * h]
                for j in range(NT):
                    top = fmax(top, fmax(S[i, j, 2 * h], S[i, j, 2 * h + 1]))
                top = fmax(top, shfl_xor(top, 1))
                top = fmax(top, shfl_xor(top, 2))
                m_new = fmax(m[i, h], top if RAW else fmul(top, factor))
                shrink = fadd(m[i, h], -m_new)
                rescale = ex2(fmul(shrink, factor) if RAW else shrink)
                m[i, h] = m_new
                l[i, h] = fmul(l[i, h], rescale)
                for j in range(ET):
                    acc[i, j, 2 * h] *= rescale
                    acc[i, j, 2 * h + 1] *= rescale
        unroll_loops()

    @word
    def exponentials(m, sums, S, factor):
        """P = 2**(S factor - m) in S's place, and this lane's sums of it."""
        for i in range(MT):
            for h in range(2):
                total = ZERO
                for j in range(NT):
                    for c in range(2):
                        x, top = S[i, j, 2 * h + c], m[i, h]
                        p = ex2(fmul(fadd(x, -top), factor) if RAW else fma(x, factor, -top))
                        S[i, j, 2 * h + c] = p
                        total += p
                sums[i, h] = total
        unroll_loops()

    @word
    def outgrown(sums):
        """Whether a lane's sum passes `LIMIT`, or is NaN."""
        grown = u32(0)
        for i in range(MT):
            for h in range(2):
                grown = grown if sums[i, h] <= LIMIT else u32(1)
        unroll_loops()
        return ballot(grown) != 0

    @word
    def add_tile(l, sums):
        """l stays this lane's part of a row's sum."""
        for i in range(MT):
            for h in range(2):
                l[i, h] = fadd(l[i, h], sums[i, h])
        unroll_loops()

    @word
    def add_sums(m, l, factor):
        """l of the whole row, from the parts of its four lanes; m in base 2."""
        for i in range(MT):
            for h in range(2):
                if RAW:
                    m[i, h] = fmul(m[i, h], factor)
                total = fadd(l[i, h], shfl_xor(l[i, h], 1))
                l[i, h] = fadd(total, shfl_xor(total, 2))
        unroll_loops()

    @word
    def strange(m, l, acc):
        """NaN if a sum of this lane is NaN, infinite, or of weights that vanished; else 0."""
        mark = ZERO
        for i in range(MT):
            for h in range(2):
                mark = fma(l[i, h], ZERO, mark)
                if not RAW and vanished(m[i, h], l[i, h]):
                    mark = NAN
                for j in range(ET):
                    mark = fma(acc[i, j, 2 * h], ZERO, mark)
                    mark = fma(acc[i, j, 2 * h + 1], ZERO, mark)
        unroll_loops()
        return mark

    @word
    def store_L(L, m, l, row, rows, t):
        """L of this warp's rows; ``row`` is this lane's first row of the tile at ``L``."""
        for i in range(MT):
            for h in range(2):
                r = i32(row + 16 * i + 8 * h)
                if t == 0 and r < rows:
                    st_global_f32(L + u64(r) * u64(4), log_sum(m[i, h], l[i, h]))
        unroll_loops()

    own = words_tf32(layout) if dtype == "float32" else words_16(layout, *ARITHMETIC[dtype])
    return SimpleNamespace(
        fetch_Q=fetch_Q, fetch_K=fetch_K, fetch_V=fetch_V, start_Q=start_Q, start_K=start_K,
        start_V=start_V, reset=reset, scores=own.scores, scale_first=scale_first, hide=hide,
        raise_maxima=raise_maxima, exponentials=exponentials, outgrown=outgrown, add_tile=add_tile,
        accumulate=own.accumulate, add_sums=add_sums, strange=strange, store=own.store,
        store_L=store_L, A_shape=own.A_shape,
        exactly=exactly_by(layout, own.load, own.save),
    )  # fmt: skip


def words_16(layout: MmaLayout, mma, pack, widen) -> SimpleNamespace:
    """What is particular to float16 and bfloat16: products of depth 16, P rounded to storage."""
    MT, ROWS = layout.row_tiles, 16 * layout.row_tiles
    NT, KT = layout.block_k // 8, layout.d // 16  # column tiles and steps of S = Q K^T
    ET, PT = layout.e // 8, layout.block_k // 16  # column tiles and steps of O += P V
    Q_PITCH, K_PITCH = (CHUNK_BYTES * x.chunks for x in (layout.Q_swizzle, layout.K_swizzle))
    V_PITCH = CHUNK_BYTES * layout.V_swizzle.chunks
    VS, VM = layout.V_swizzle.shift, layout.V_swizzle.mask
    rows_and_places = matrices_of_scores(layout)
    SHIFT, MASK, CHUNK = layout.Q_swizzle.shift, layout.Q_swizzle.mask, layout.chunk
    ACROSS = 1 << (layout.V_swizzle.chunks - 1).bit_length()  # lanes that write a row

    @word
    def product(C, i, j, A, b0, b1):
        """C[i, j] += A[i] B, one instruction."""
        C[i, j, 0], C[i, j, 1], C[i, j, 2], C[i, j, 3] = mma(
            A[i, 0], A[i, 1], A[i, 2], A[i, 3], b0, b1,
            C[i, j, 0], C[i, j, 1], C[i, j, 2], C[i, j, 3],
        )  # fmt: skip

    @word
    def scores(S, A, Q_buffer, K_buffer, lane):
        """S = Q K^T: 16 columns of Q and K a step; a matrix of K serves all row tiles.

        ``Q_buffer`` is where this warp's rows begin.
        """
        Q_rows, Q_place, K_rows, K_place = rows_and_places(Q_buffer, K_buffer, lane)
        for i in range(MT):
            for j in range(NT):
                for c in range(4):
                    S[i, j, c] = ZERO
        for k in range(KT):
            for i in range(MT):
                A[i, 0], A[i, 1], A[i, 2], A[i, 3] = ldmatrix_x4(
                    u32(Q_rows + i * 16 * Q_PITCH + (Q_place ^ (32 * k)))
                )
            for j in range(0, NT, 2):
                b0, b1, b2, b3 = ldmatrix_x4(u32(K_rows + j * 8 * K_PITCH + (K_place ^ (32 * k))))
                for i in range(MT):
                    product(S, i, j, A, b0, b1)
                    product(S, i, j + 1, A, b2, b3)
        unroll_loops()

    @word
    def accumulate(acc, A, P, l, V_buffer, lane):
        """acc += P V: 16 keys a step. P's registers are those of mma's A, once rounded."""
        V_rows = u32(V_buffer + ((lane & 7) + (((lane >> 3) & 1) << 3)) * V_PITCH)
        V_place = i32(((lane >> 4) ^ (((lane & 7) >> VS) & VM)) << 4)
        for k in range(PT):
            for i in range(MT):
                for half in range(2):
                    A[i, 2 * half] = pack(P[i, 2 * k + half, 0], P[i, 2 * k + half, 1])
                    A[i, 2 * half + 1] = pack(P[i, 2 * k + half, 2], P[i, 2 * k + half, 3])
            for j in range(0, ET, 2):
                b0, b1, b2, b3 = ldmatrix_x4_trans(
                    u32(V_rows + k * 16 * V_PITCH + (V_place ^ (16 * j)))
                )
                for i in range(MT):
                    product(acc, i, j, A, b0, b1)
                    product(acc, i, j + 1, A, b2, b3)
        unroll_loops()

    @word
    def store(O, O_row, acc, l, Q_buffer, row0, rows, e, lane):
        """O = acc / l, rounded, through this warp's own rows of Q, so that it writes whole rows."""
        g, t = i32(lane >> 2), i32(lane & 3)
        for i in range(MT):
            for h in range(2):
                inverse = ZERO if l[i, h] == ZERO else ONE / l[i, h]
                r = i32(row0 + 16 * i + 8 * h + g)
                x = i32((r >> SHIFT) & MASK)
                for j in range(ET):
                    st_shared_b32(
                        u32(Q_buffer + r * Q_PITCH + ((j ^ x) << 4) + 4 * t),
                        pack(acc[i, j, 2 * h] * inverse, acc[i, j, 2 * h + 1] * inverse),
                    )
        cuda.syncwarp()  # write-read: O, of this warp's own rows
        chunk = i32(lane % ACROSS)
        for i in range(ROWS * ACROSS // 32):
            r = i32(row0 + i * (32 // ACROSS) + lane // ACROSS)
            if r < rows and chunk * CHUNK < e:
                x = i32((r >> SHIFT) & MASK)
                x0, x1, x2, x3 = ld_shared_v4(u32(Q_buffer + r * Q_PITCH + ((chunk ^ x) << 4)))
                st_global_v4(O + u64(r) * O_row + u64(chunk * 16), x0, x1, x2, x3)
        unroll_loops()

    @word
    def load(address):
        return widen(ld_global_b16(address))

    @word
    def save(address, x):
        st_global_b16(address, pack(x, ZERO))

    return SimpleNamespace(
        scores=scores, accumulate=accumulate, store=store, load=load, save=save, A_shape=(MT, 4)
    )  # fmt: skip


def words_tf32(layout: MmaLayout) -> SimpleNamespace:
    """What is particular to float32: three TF32 products of depth 8 for one.

    A matrix of ldmatrix is 8 rows of 4 float32 here, a lane gets (g, t): mma's A and K's B. P and V
    need no such thing if both agree on an order of keys and columns: in a group of 8 keys, slots t
    and t + 4 of P's columns and V's rows are keys 2t and 2t + 1, which is where P's registers are;
    in a group of 32 columns, column tile j's column g is 4 g + j, so that a lane loads V for four
    tiles at once, and ends with 8 neighbouring columns of O.

    The assembler interleaves what is in one piece of code until it is out of registers, so there
    are several: the columns of Q and K pass in a loop, 32 columns of V are one of a single turn.
    """
    MT = layout.row_tiles
    NT, KT = layout.block_k // 8, layout.d // 8
    ET, PT = layout.e // 8, layout.block_k // 8
    QK, PV = (math.gcd(steps, layout.chain) for steps in (KT, PT))  # steps a chain
    TURN = layout.turn  # steps a turn of the loop over columns
    Q_PITCH, K_PITCH = (CHUNK_BYTES * x.chunks for x in (layout.Q_swizzle, layout.K_swizzle))
    V_PITCH = CHUNK_BYTES * layout.V_swizzle.chunks
    rows_and_places = matrices_of_scores(layout)
    assert layout.V_swizzle.mask == 7  # x = r & 7

    @word
    def chain(C, A, k, B, j, STEPS, TERM):
        """C = A[:, k:] B[:, j : j + 2], two column tiles, over a chain of steps.

        Terms 0 and 1 are the small ones. A has big parts in registers 0 to 3, B in 0 and 1.
        """
        for i in range(MT):
            for h in range(2):
                for c in range(4):
                    C[i, h, c] = ZERO
        for term in range(TERM, 3):
            a, b = 4 if term == 0 else 0, 2 if term == 1 else 0
            for u in range(STEPS):
                for i in range(MT):
                    for h in range(2):
                        C[i, h, 0], C[i, h, 1], C[i, h, 2], C[i, h, 3] = mma_tf32(
                            A[i, k + u, a], A[i, k + u, a + 1],
                            A[i, k + u, a + 2], A[i, k + u, a + 3],
                            B[u, j + h, b], B[u, j + h, b + 1],
                            C[i, h, 0], C[i, h, 1], C[i, h, 2], C[i, h, 3],
                        )  # fmt: skip
        unroll_loops()

    @word
    def scores(S, A, Q_buffer, K_buffer, lane):
        """S = Q K^T: 8 columns of Q and K a step."""
        B = cuda.local.array((QK, 2, 4), types.uint32)
        C = cuda.local.array((MT, 2, 4), types.float32)
        Q_rows, Q_place, K_rows, K_place = rows_and_places(Q_buffer, K_buffer, lane)
        for i in range(MT):
            for j in range(NT):
                for c in range(4):
                    S[i, j, c] = ZERO
        for turn in range(0, i32(anew(u32(KT))), TURN):
            for k in range(0, TURN, QK):
                for u in range(QK):
                    column = i32(32 * (turn + k + u))  # in bytes
                    for i in range(MT):
                        x0, x1, x2, x3 = ldmatrix_x4(
                            u32(Q_rows + i * 16 * Q_PITCH + (Q_place ^ column))
                        )
                        A[i, u, 0], A[i, u, 4] = split_tf32(x0)
                        A[i, u, 1], A[i, u, 5] = split_tf32(x1)
                        A[i, u, 2], A[i, u, 6] = split_tf32(x2)
                        A[i, u, 3], A[i, u, 7] = split_tf32(x3)
                for j in range(0, NT, 2):
                    for u in range(QK):
                        column = i32(32 * (turn + k + u))
                        x0, x1, x2, x3 = ldmatrix_x4(
                            u32(K_rows + j * 8 * K_PITCH + (K_place ^ column))
                        )
                        B[u, 0, 0], B[u, 0, 2] = split_tf32(x0)
                        B[u, 0, 1], B[u, 0, 3] = split_tf32(x1)
                        B[u, 1, 0], B[u, 1, 2] = split_tf32(x2)
                        B[u, 1, 1], B[u, 1, 3] = split_tf32(x3)
                    chain(C, A, 0, B, 0, QK, 0)
                    for i in range(MT):
                        for h in range(2):
                            for c in range(4):
                                S[i, j + h, c] += C[i, h, c]
        unroll_loops()

    @word
    def accumulate(acc, A, P, l, V_buffer, lane):
        """acc += P V: 8 keys a step; a tile's product is summed before it is added.

        Where weights are few, V's last bit is seen in the sum: no key of a row with l >= 4 has more
        than a quarter of the weight, and a lane's part of l is at most l.
        """
        B = cuda.local.array((PT, 4, 4), types.uint32)
        C = cuda.local.array((MT, 2, 4), types.float32)
        Y = cuda.local.array((MT, 4, 4), types.float32)
        g, t = i32(lane >> 2), i32(lane & 3)
        even = u32(V_buffer + 2 * t * V_PITCH)  # rows of key 2t; place g ^ x, x = r & 7
        even_place, odd_place = i32((g ^ (2 * t)) << 4), i32((g ^ (2 * t + 1)) << 4)
        for k in range(PT):
            for i in range(MT):
                A[i, k, 0], A[i, k, 4] = split_tf32(float_bits(P[i, k, 0]))
                A[i, k, 1], A[i, k, 5] = split_tf32(float_bits(P[i, k, 2]))
                A[i, k, 2], A[i, k, 6] = split_tf32(float_bits(P[i, k, 1]))
                A[i, k, 3], A[i, k, 7] = split_tf32(float_bits(P[i, k, 3]))
        for J in range(ET // 4):
            for _ in range(i32(anew(u32(1)))):
                for k in range(0, PT, PV):
                    for u in range(PV):
                        at = u32(even + (k + u) * 8 * V_PITCH + J * 128)
                        x0, x1, x2, x3 = ld_shared_v4(u32(at + even_place))
                        B[u, 0, 0], B[u, 0, 2] = split_tf32(x0)
                        B[u, 1, 0], B[u, 1, 2] = split_tf32(x1)
                        B[u, 2, 0], B[u, 2, 2] = split_tf32(x2)
                        B[u, 3, 0], B[u, 3, 2] = split_tf32(x3)
                        x0, x1, x2, x3 = ld_shared_v4(u32(at + V_PITCH + odd_place))
                        B[u, 0, 1], B[u, 0, 3] = split_tf32(x0)
                        B[u, 1, 1], B[u, 1, 3] = split_tf32(x1)
                        B[u, 2, 1], B[u, 2, 3] = split_tf32(x2)
                        B[u, 3, 1], B[u, 3, 3] = split_tf32(x3)
                    for j in range(0, 4, 2):
                        chain(C, A, k, B, j, PV, 0)
                        for i in range(MT):
                            for h in range(2):
                                for c in range(4):
                                    if k == 0:
                                        Y[i, j + h, c] = C[i, h, c]
                                    else:
                                        Y[i, j + h, c] += C[i, h, c]
                for i in range(MT):
                    for j in range(4):
                        for c in range(4):
                            acc[i, 4 * J + j, c] += Y[i, j, c]

        few = ZERO
        for i in range(MT):
            for h in range(2):
                few = ONE if l[i, h] < ONE else few
        if ballot(float_bits(few)) != 0:
            for J in range(ET // 4):
                for _ in range(i32(anew(u32(1)))):
                    for k in range(PT):
                        at = u32(even + k * 8 * V_PITCH + J * 128)
                        x0, x1, x2, x3 = ld_shared_v4(u32(at + even_place))
                        B[k, 0, 0], B[k, 1, 0] = lost_tf32(x0), lost_tf32(x1)
                        B[k, 2, 0], B[k, 3, 0] = lost_tf32(x2), lost_tf32(x3)
                        x0, x1, x2, x3 = ld_shared_v4(u32(at + V_PITCH + odd_place))
                        B[k, 0, 1], B[k, 1, 1] = lost_tf32(x0), lost_tf32(x1)
                        B[k, 2, 1], B[k, 3, 1] = lost_tf32(x2), lost_tf32(x3)
                    for j in range(0, 4, 2):
                        chain(C, A, 0, B, j, PT, 2)
                        for i in range(MT):
                            for h in range(2):
                                for c in range(4):
                                    acc[i, 4 * J + j + h, c] += C[i, h, c]
        unroll_loops()

    @word
    def store(O, O_row, acc, l, Q_buffer, row0, rows, e, lane):
        """O = acc / l: 8 neighbouring columns a lane, 32 of a row in four lanes."""
        g, t = i32(lane >> 2), i32(lane & 3)
        for i in range(MT):
            for h in range(2):
                inverse = ZERO if l[i, h] == ZERO else ONE / l[i, h]
                r = i32(row0 + 16 * i + 8 * h + g)
                for J in range(ET // 4):
                    for c in range(2):
                        column = i32(32 * J + 8 * t + 4 * c)
                        if r < rows and column < e:
                            st_global_v4(
                                O + u64(r) * O_row + u64(column) * u64(4),
                                float_bits(acc[i, 4 * J, 2 * h + c] * inverse),
                                float_bits(acc[i, 4 * J + 1, 2 * h + c] * inverse),
                                float_bits(acc[i, 4 * J + 2, 2 * h + c] * inverse),
                                float_bits(acc[i, 4 * J + 3, 2 * h + c] * inverse),
                            )
        unroll_loops()

    @word
    def load(address):
        return bits_float(ld_global_b32(address))

    @word
    def save(address, x):
        st_global_b32(address, float_bits(x))

    return SimpleNamespace(
        scores=scores, accumulate=accumulate, store=store, load=load, save=save,
        A_shape=(MT, max(QK, PT), 8),
    )  # fmt: skip


def exactly_by(layout: MmaLayout, load, save):
    """``exactly``: a row by plain arithmetic, for what tensor cores cannot keep apart."""
    E32, ITEM = -(-layout.e // 32), layout.itemsize

    @word
    def exactly(q, k, v, O, L, k_row, v_row, d, e, first, end, scale, want_L, y):
        """One row, at q, O and L, over the keys first .. end - 1; all lanes work on it."""
        lane = i32(cuda.threadIdx.x & 31)
        m, l = -INF, ZERO
        for u in range(E32):
            y[u] = ZERO
        for j in range(first, end):
            score = ZERO
            for column in range(0, d, 32):
                if column + lane < d:
                    at = u64(column + lane) * u64(ITEM)
                    score = fma(load(q + at), load(k + u64(j) * k_row + at), score)
            for bit in range(5):
                score = fadd(score, shfl_xor(score, 1 << bit))
            score = fmul(fmul(score, scale), LOG2E)
            m_new = fmax(m, score)
            shift = ZERO if m_new == -INF else m_new
            rescale = ex2(fadd(m, -shift))
            p = ex2(fadd(score, -shift))
            m = m_new
            l = fma(l, rescale, p)
            for u in range(E32):
                if 32 * u + lane < e:
                    at = u64(32 * u + lane) * u64(ITEM)
                    y[u] = fma(p, load(v + u64(j) * v_row + at), fmul(y[u], rescale))
        inverse = ZERO if l == ZERO else ONE / l
        for u in range(E32):
            if 32 * u + lane < e:
                save(O + u64(32 * u + lane) * u64(ITEM), y[u] * inverse)
        if want_L != 0 and lane == 0:
            st_global_f32(L, log_sum(m, l))
        unroll_loops()

    return exactly
