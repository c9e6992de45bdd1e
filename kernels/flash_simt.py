"""Tiled attention with the online softmax, as CUDA kernels written in Python: two loop orders.

``q_outer``   a Q tile stays on chip, K and V stream past it; m, l and the accumulator stay in
              registers. FlashAttention-2, arXiv 2307.08691, Algorithm 1. A block per row tile.
``kv_outer``  a K and a V tile stay, the row tiles stream past; m, l and O travel through global
              memory at every visit. FlashAttention-1, arXiv 2205.14135, Algorithm 1. Row tiles take
              turns at updating O, so a head is one block: this order leaves no parallelism but
              batch x heads, and a GPU with more multiprocessors than that stands partly idle.

Arithmetic is float32, storage 16 or 32 bits; no warp operations, no tensor cores. What lives where:

=========  ===================  =======================  ===============================
buffer     q_outer              kv_outer                 written by; read by
=========  ===================  =======================  ===============================
Q          shared [Br, d]       shared [Br, d], a visit  load_Q; scores
K          shared [Bc, d]       shared [Bc, d]           load_K; scores
V          K's place [Bc, e]    shared [Bc, e]           load_V; accumulate
S          registers [MR, MC]   registers [MR, MC]       scores, hide; update
P          shared [Br, Bc]      shared [Br, Bc]          update; accumulate
posts      shared [Br, TX]      shared [Br, TX]          post_maxima, post_sums;
                                                         update, add_sums
m, l       registers [MR]       global [n], a visit      update, add_sums; resume
O (acc)    registers [MR, ME]   global [n, e], a visit   accumulate, store; resume
=========  ===================  =======================  ===============================

Tensors are pointers to their first element with strides (batch, head, row) in elements; the last
axis is contiguous. Row r sees the keys r + s - n - left .. r + s - n + right: causal is right = 0,
unlimited is n + s. Each query head loads its own K and V, even where heads share them.

A barrier's comment names what it orders: "write-read", what was written before it is read after it;
"read-write", what was read before it may be overwritten after it.
"""

from __future__ import annotations

import numpy as np

from ._cuda import ELEMENT, SHARED_ALIGN, cuda, types
from .layout import Layout, buffers
from .tiles import log_sum, words

ZERO, INF = np.float32(0), np.float32(np.inf)


def q_outer(layout: Layout, dtype: str):
    """The kernel in which a Q tile stays. Grid: batch x heads x row tiles, in one dimension."""
    w = words(layout, buffers("q_outer", layout), dtype)
    load_Q, load_K, load_V, reset, scores = w.load_Q, w.load_K, w.load_V, w.reset, w.scores
    hide, post_maxima, update = w.hide, w.post_maxima, w.update
    accumulate, accumulate_seen = w.accumulate, w.accumulate_seen
    post_sums, add_sums, store = w.post_sums, w.add_sums, w.store
    Br, Bc, TX, TY, KEYS = layout.block_q, layout.block_k, layout.tx, layout.ty, layout.keys
    MR, MC, ME, IN_FLIGHT = layout.MR, layout.MC, layout.ME, layout.in_flight

    def flash_q_outer(
        q, k, v, O, L, q_strides, k_strides, v_strides, O_strides,
        n, s, d, e, heads, group, left, right, scale, want_L,
    ):  # fmt: skip
        smem = cuda.shared.array(0, ELEMENT, alignment=SHARED_ALIGN)
        S = cuda.local.array((MR, MC), ELEMENT)
        acc = cuda.local.array((MR, ME), ELEMENT)
        m = cuda.local.array(MR, ELEMENT)
        l = cuda.local.array(MR, ELEMENT)
        a = cuda.local.array((MR, 4), ELEMENT)  # operands on their way from shared memory
        x = cuda.local.array(IN_FLIGHT, ELEMENT)  # elements on their way to shared memory
        ty, tx = cuda.threadIdx.x // TX, cuda.threadIdx.x % TX

        program = cuda.blockIdx.x
        Tr = (n + Br - 1) // Br
        i0 = (Tr - 1 - program % Tr) * Br  # the last row tile, the longest if causal, goes first
        batch, head = program // Tr // heads, program // Tr % heads
        q_row, k_row, v_row, O_row = q_strides[2], k_strides[2], v_strides[2], O_strides[2]
        q_at = batch * q_strides[0] + head * q_strides[1] + i0 * q_row
        k_at = batch * k_strides[0] + head // group * k_strides[1]
        v_at = batch * v_strides[0] + head // group * v_strides[1]
        O_at = batch * O_strides[0] + head * O_strides[1] + i0 * O_row

        rows = min(Br, n - i0)
        see_from = i0 + s - n - left  # the tile's row r sees the keys see_from + r .. see_to + r
        see_to = i0 + s - n + right
        first_key, end_key = max(0, see_from), min(s, see_to + rows)

        load_Q(smem, x, q, q_at, q_row, rows, d, ty, tx)
        reset(m, l, acc)
        for j0 in range(first_key // Bc * Bc, end_key, Bc):
            keys = min(Bc, s - j0)
            first, last = see_from - j0, see_to - j0  # counted from the K tile's first key
            hides = first + rows - 1 > 0 or last < keys - 1
            load_K(smem, x, k, k_at + j0 * k_row, k_row, keys, d, ty, tx)
            cuda.syncthreads()  # write-read: K, and at first Q
            scores(S, a, smem, scale, d, ty, tx)
            if hides or keys < KEYS:
                hide(S, first, last, keys, ty, tx)
            post_maxima(smem, S, ty, tx)
            cuda.syncthreads()  # write-read: the maxima. read-write: K, whose place V takes
            load_V(smem, x, v, v_at + j0 * v_row, v_row, keys, e, ty, tx)
            update(m, l, acc, S, smem, ty, tx)
            cuda.syncthreads()  # write-read: V and P
            if hides:
                accumulate_seen(acc, smem, first, last, keys, ty, tx)
            else:
                accumulate(acc, a, smem, keys, ty, tx)
            cuda.syncthreads()  # read-write: V, P and the maxima

        post_sums(smem, l, ty, tx)
        cuda.syncthreads()  # write-read: the sums
        add_sums(l, smem, ty)
        store(O, O_at, O_row, acc, l, rows, e, ty, tx)
        if want_L and tx == 0:
            for i in range(MR):
                r = ty + TY * i
                if r < rows:
                    L[(batch * heads + head) * n + i0 + r] = log_sum(m[i], l[i])

    return flash_q_outer


def kv_outer(layout: Layout, dtype: str):
    """The kernel in which a K and a V tile stay. Grid: batch x heads.

    O is normalised and rounded to storage at each visit; m and l are float32 [batch, heads, n].
    """
    at = buffers("kv_outer", layout)
    w = words(layout, at, dtype)
    load_Q, load_K, load_V, reset, scores = w.load_Q, w.load_K, w.load_V, w.reset, w.scores
    resume, hide, post_maxima, update = w.resume, w.hide, w.post_maxima, w.update
    accumulate, accumulate_seen = w.accumulate, w.accumulate_seen
    post_sums, add_sums, store, narrow = w.post_sums, w.add_sums, w.store, w.narrow
    Br, Bc, TX, TY, KEYS = layout.block_q, layout.block_k, layout.tx, layout.ty, layout.keys
    MR, MC, ME, IN_FLIGHT = layout.MR, layout.MC, layout.ME, layout.in_flight
    THREADS, M0, L0 = layout.threads, at.m, at.l

    def flash_kv_outer(
        q, k, v, O, L, m_hbm, l_hbm, q_strides, k_strides, v_strides, O_strides,
        n, s, d, e, heads, group, left, right, scale, want_L,
    ):  # fmt: skip
        smem = cuda.shared.array(0, ELEMENT, alignment=SHARED_ALIGN)
        S = cuda.local.array((MR, MC), ELEMENT)
        acc = cuda.local.array((MR, ME), ELEMENT)
        m = cuda.local.array(MR, ELEMENT)
        l = cuda.local.array(MR, ELEMENT)
        a = cuda.local.array((MR, 4), ELEMENT)  # operands on their way from shared memory
        x = cuda.local.array(IN_FLIGHT, ELEMENT)  # elements on their way to shared memory
        tid = cuda.threadIdx.x
        ty, tx = tid // TX, tid % TX

        program = cuda.blockIdx.x
        batch, head = program // heads, program % heads
        q_row, k_row, v_row, O_row = q_strides[2], k_strides[2], v_strides[2], O_strides[2]
        q_at = batch * q_strides[0] + head * q_strides[1]
        k_at = batch * k_strides[0] + head // group * k_strides[1]
        v_at = batch * v_strides[0] + head // group * v_strides[1]
        O_at = batch * O_strides[0] + head * O_strides[1]
        stats_at = program * n

        for r in range(ty, n, TY):
            for c in range(tx, e, TX):
                O[O_at + r * O_row + c] = narrow(ZERO)
        for r in range(tid, n, THREADS):
            m_hbm[stats_at + r] = -INF
            l_hbm[stats_at + r] = ZERO

        for j0 in range(0, s, Bc):
            cuda.syncthreads()  # write-read: m, l and O in global memory, of the pass before
            keys = min(Bc, s - j0)
            first_row = max(0, j0 - right - s + n)  # rows first_row .. end_row - 1 see this tile
            end_row = min(n, j0 + keys + left - s + n)
            if first_row < end_row:
                load_K(smem, x, k, k_at + j0 * k_row, k_row, keys, d, ty, tx)
                load_V(smem, x, v, v_at + j0 * v_row, v_row, keys, e, ty, tx)
            for i0 in range(first_row // Br * Br, end_row, Br):
                rows = min(Br, n - i0)
                first = i0 + s - n - left - j0  # the tile's row r sees first + r .. last + r
                last = i0 + s - n + right - j0
                hides = first + rows - 1 > 0 or last < keys - 1
                load_Q(smem, x, q, q_at + i0 * q_row, q_row, rows, d, ty, tx)
                for r in range(tid, rows, THREADS):
                    smem[M0 + r] = m_hbm[stats_at + i0 + r]
                    smem[L0 + r] = l_hbm[stats_at + i0 + r]
                reset(m, l, acc)
                cuda.syncthreads()  # write-read: Q, m, l, and at first K and V
                resume(m, l, acc, smem, O, O_at + i0 * O_row, O_row, rows, e, ty, tx)
                scores(S, a, smem, scale, d, ty, tx)
                if hides or keys < KEYS:
                    hide(S, first, last, keys, ty, tx)
                post_maxima(smem, S, ty, tx)
                cuda.syncthreads()  # write-read: the maxima. read-write: Q, m and l
                update(m, l, acc, S, smem, ty, tx)
                cuda.syncthreads()  # write-read: P. read-write: the maxima
                if hides:
                    accumulate_seen(acc, smem, first, last, keys, ty, tx)
                else:
                    accumulate(acc, a, smem, keys, ty, tx)
                post_sums(smem, l, ty, tx)
                cuda.syncthreads()  # write-read: the sums. read-write: P, and at last K and V
                add_sums(l, smem, ty)
                store(O, O_at + i0 * O_row, O_row, acc, l, rows, e, ty, tx)
                if tx == 0:
                    for i in range(MR):
                        r = ty + TY * i
                        if r < rows:
                            m_hbm[stats_at + i0 + r] = m[i]
                            l_hbm[stats_at + i0 + r] = l[i]

        if want_L:
            cuda.syncthreads()  # write-read: m and l in global memory
            for r in range(tid, n, THREADS):
                L[stats_at + r] = log_sum(m_hbm[stats_at + r], l_hbm[stats_at + r])

    return flash_kv_outer


KERNELS = {"q_outer": q_outer, "kv_outer": kv_outer}
STORAGE = {"float32": types.float32, "float16": types.float16, "bfloat16": types.uint16}


def signature(variant: str, dtype: str):
    """A kernel's argument types for Numba: pointers, four triples of strides, numbers."""
    tensor, stats = types.CPointer(STORAGE[dtype]), types.CPointer(types.float32)
    statistics = 3 if variant == "kv_outer" else 1  # L; and m, l
    strides = types.UniTuple(types.int64, 3)
    return types.void(
        *[tensor] * 4, *[stats] * statistics, *[strides] * 4,
        *[types.int64] * 8, types.float32, types.int64,
    )  # fmt: skip
