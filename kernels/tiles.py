"""The words a kernel is written in: load, score, hide, post, update, accumulate, store.

Each is a device function that a thread runs for its own share. None of them synchronises, so every
barrier is visible in the kernel. ``words`` binds them to one layout's constants: loops over a
thread's own rows, keys and columns then unroll, and its arrays become registers.

``S[i, c]`` is row ``ty + TY*i`` and key ``tx + TX*c`` of the tile; ``acc[i, c]`` the same row and
value column ``tx + TX*c``. Read next: ``flash_simt.py``, where the words make two loop orders.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np

from ._cuda import bits_float, device, float16, float32, float_bits, int32, offset, uint16, uint32
from .layout import Buffers, Layout, rows_at_once

ZERO, ONE, INF = np.float32(0), np.float32(1), np.float32(np.inf)
HALF_WAY, QUIET_NAN = np.uint32(0x7FFF), np.uint32(0x7FC0)
UNIT, SIXTEEN = np.uint32(1), np.uint32(16)


@device
def as_is(x):
    return x


@device
def half_to_float(x):
    return float32(x)


@device
def float_to_half(x):
    return float16(x)


@device
def bfloat_to_float(u):
    """bfloat16 is a float32's upper half; arrays hold it as uint16."""
    return bits_float(uint32(u) << SIXTEEN)


@device
def float_to_bfloat(x):
    """Round to nearest, ties to even: add just under half a unit, and the last bit kept."""
    u = QUIET_NAN
    if x == x:
        bits = float_bits(x)
        u = uint32(bits + HALF_WAY + ((bits >> SIXTEEN) & UNIT)) >> SIXTEEN
    return uint16(u)


STORAGE = {  # what a kernel reads and writes, as float32
    "float32": (as_is, as_is),
    "float16": (half_to_float, float_to_half),
    "bfloat16": (bfloat_to_float, float_to_bfloat),
}


@device
def log_sum(m, l):
    """L = log(sum(exp(score))) of a row; m, which is -inf, if it saw no key.

    Without a branch around m: a compiler would read it only where it is taken.
    """
    return m + float32(math.log(ONE if l == ZERO else l))


def words(layout: Layout, at: Buffers, dtype: str) -> SimpleNamespace:
    """The device functions below, for one layout and one storage type.

    ``smem`` is a block's shared memory, in which ``at`` says where each buffer starts.
    """
    widen, narrow = STORAGE[dtype]
    TX, TY = layout.tx, layout.ty
    MR, MC, ME = layout.MR, layout.MC, layout.ME
    Q0, K0, V0, P0, POSTS, M0, L0 = at.Q, at.K, at.V, at.P, at.posts, at.m, at.l
    DP, EP, PP, RP = at.d_pitch, at.e_pitch, at.p_pitch, at.post_pitch

    def loader(tile0: int, pitch: int, tile_rows: int, tile_width: int):
        """A ``load`` for one buffer: a thread asks for B of its rows before it waits for one."""
        R, C = tile_rows // TY, tile_width // TX  # rows and columns of a thread
        B = rows_at_once(R, C)

        @device
        def load(smem, x, src, start, stride, rows, width, ty, tx):
            """Copy ``rows`` x ``width`` of global memory into the buffer; zeros fill the rest.

            Only existing elements are read. Neighbouring threads read neighbouring elements.
            """
            cols = int32(width - tx)
            for i in range(0, R, B):
                for b in range(B):
                    r = ty + TY * (i + b)
                    first = start + r * stride + tx
                    for c in range(C):
                        x[b * C + c] = ZERO
                        if r < rows and TX * c < cols:
                            x[b * C + c] = widen(src[first + TX * c])
                for b in range(B):
                    r = ty + TY * (i + b)
                    for c in range(C):
                        smem[offset(tile0 + r * pitch + tx + TX * c)] = x[b * C + c]

        return load

    @device
    def reset(m, l, acc):
        """A row that has seen nothing: m = -inf, l = 0, acc = 0."""
        for i in range(MR):
            m[i] = -INF
            l[i] = ZERO
            for c in range(ME):
                acc[i, c] = ZERO

    @device
    def resume(m, l, acc, smem, O, O_at, O_row, rows, e, ty, tx):
        """A row where it was left: m and l, fetched to shared memory, and O, un-normalised again.

        l is a sum over the threads of a row: one of them gets it, the others start from 0.
        """
        for i in range(MR):
            r = ty + TY * i
            if r < rows:
                m[i] = smem[offset(M0 + r)]
                l_old = smem[offset(L0 + r)]
                l[i] = l_old if tx == 0 else ZERO
                for c in range(ME):
                    if tx + TX * c < e:
                        acc[i, c] = widen(O[O_at + r * O_row + tx + TX * c]) * l_old

    @device
    def scores(S, a, smem, scale, d, ty, tx):
        """S = Q K^T * scale: four columns of Q and K at a time, one 16-byte load a row."""
        for i in range(MR):
            for c in range(MC):
                S[i, c] = ZERO
        for k in range(0, d, 4):
            for i in range(MR):
                for u in range(4):
                    a[i, u] = smem[offset(Q0 + (ty + TY * i) * DP + k + u)]
            for c in range(MC):
                for u in range(4):
                    b = smem[offset(K0 + (tx + TX * c) * DP + k + u)]
                    for i in range(MR):
                        S[i, c] += a[i, u] * b
        for i in range(MR):
            for c in range(MC):
                S[i, c] *= scale

    @device
    def hide(S, first, last, keys, ty, tx):
        """Hidden pairs become -inf. Row r of the tile sees its keys first + r .. last + r."""
        for i in range(MR):
            r = ty + TY * i
            for c in range(MC):
                key = tx + TX * c
                if key >= keys or key < first + r or key > last + r:
                    S[i, c] = -INF

    @device
    def post_maxima(smem, S, ty, tx):
        """Post the largest of this thread's scores in each of its rows."""
        for i in range(MR):
            top = -INF
            for c in range(MC):
                top = max(top, S[i, c])
            smem[offset(POSTS + (ty + TY * i) * RP + tx)] = top

    @device
    def update(m, l, acc, S, smem, ty, tx):
        """The online softmax: new m, weights P = exp(S - m), and l and acc rescaled to the new m.

        P goes to shared memory; l stays this thread's part of the sum. While a row has seen nothing
        its m is -inf, and its scores are shifted by 0: -inf - (-inf) is not a number.
        """
        for i in range(MR):
            m_new = m[i]
            for t in range(TX):
                m_new = max(m_new, smem[offset(POSTS + (ty + TY * i) * RP + t)])
            shift = m_new if m_new > -INF else ZERO
            rescale = float32(math.exp(m[i] - shift))
            m[i] = m_new
            l[i] *= rescale
            for c in range(ME):
                acc[i, c] *= rescale
            for c in range(MC):
                p = float32(math.exp(S[i, c] - shift))
                l[i] += p
                smem[offset(P0 + (ty + TY * i) * PP + tx + TX * c)] = p

    @device
    def accumulate(acc, a, smem, keys, ty, tx):
        """acc += P V: four keys of P at a time, one 16-byte load a row."""
        for j in range(0, keys, 4):
            for i in range(MR):
                for u in range(4):
                    a[i, u] = smem[offset(P0 + (ty + TY * i) * PP + j + u)]
            for u in range(4):
                for c in range(ME):
                    b = smem[offset(V0 + (j + u) * EP + tx + TX * c)]
                    for i in range(MR):
                        acc[i, c] += a[i, u] * b

    @device
    def accumulate_seen(acc, smem, first, last, keys, ty, tx):
        """acc += P V where pairs are hidden: their V takes no part, not even 0 * NaN."""
        for j in range(keys):
            for i in range(MR):
                r = ty + TY * i
                if first + r <= j and j <= last + r:
                    p = smem[offset(P0 + r * PP + j)]
                    for c in range(ME):
                        acc[i, c] += p * smem[offset(V0 + j * EP + tx + TX * c)]

    @device
    def post_sums(smem, l, ty, tx):
        """Post this thread's part of l in each of its rows."""
        for i in range(MR):
            smem[offset(POSTS + (ty + TY * i) * RP + tx)] = l[i]

    @device
    def add_sums(l, smem, ty):
        """l of the whole row, from the parts that its threads posted."""
        for i in range(MR):
            l[i] = ZERO
            for t in range(TX):
                l[i] += smem[offset(POSTS + (ty + TY * i) * RP + t)]

    @device
    def store(O, O_at, O_row, acc, l, rows, e, ty, tx):
        """O = acc / l, rounded to storage. A row without weight is 0: acc may be 0 * NaN there."""
        for i in range(MR):
            r = ty + TY * i
            if r < rows:
                inverse = ZERO if l[i] == ZERO else ONE / l[i]
                for c in range(ME):
                    if tx + TX * c < e:
                        o = ZERO if l[i] == ZERO else acc[i, c] * inverse
                        O[O_at + r * O_row + tx + TX * c] = narrow(o)

    return SimpleNamespace(
        load_Q=loader(Q0, DP, layout.rows, layout.d),
        load_K=loader(K0, DP, layout.kv_rows, layout.d),
        load_V=loader(V0, EP, layout.kv_rows, layout.e),
        reset=reset,
        resume=resume,
        scores=scores,
        hide=hide,
        post_maxima=post_maxima,
        update=update,
        accumulate=accumulate,
        accumulate_seen=accumulate_seen,
        post_sums=post_sums,
        add_sums=add_sums,
        store=store,
        narrow=narrow,
    )
