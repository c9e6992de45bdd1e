"""Attention on tensor cores, sm_80 and up: float16, bfloat16, and float32 by split TF32.

The loop order is ``q_outer`` (FlashAttention-2, arXiv 2307.08691, Algorithm 1): a block keeps a
tile of Br queries while tiles of Bc keys and values stream past it, the next one on its way while
one is used. A warp owns MT row tiles of 16 queries, and needs the other warps for the loads only.

=========  =============================  ================================  =====================
buffer     where                          layout                            written by; read by
=========  =============================  ================================  =====================
Q          shared [Br, W]                 rows of 16-byte chunks, swizzled  fetch_Q; scores
K          shared 2 stages x [Bc, D]      the same                          fetch_K; scores
V          shared 2 stages x [Bc, E]      the same                          fetch_V; accumulate
S, P       registers [MT, Bc / 8, 4]      mma's C: a pair of columns of     scores, hide,
                                          rows g and g + 8                  exponentials;
                                                                            accumulate
O (acc)    registers [MT, E / 8, 4]       the same                          accumulate; store
m          registers [MT, 2]              rows g and g + 8                  raise_maxima;
                                                                            exponentials
l          registers [MT, 2]              the same                          add_tile, add_sums;
                                                                            store
O (out)    Q's rows of the same warp,     as Q                              store; store
           16-bit types only
=========  =============================  ================================  =====================

D and E are the widths rounded up to whole matrices, W the larger; columns past d and e exist in
shared memory only, as zeros. m is in base 2: P = 2**(S c - m) with c = scale log2(e); for float32
m c takes the place of m.

Softmax is the same for any m, if 2**(S c - m) neither overflows nor vanishes. So in 16-bit types a
tile that all of a warp's rows see, but its first, is weighed with the maxima of the tiles before,
unseen; if a lane's sum passes `LIMIT`, the warp computes its scores again, and new maxima. The
result differs by rounding alone: P has as many bits at `LIMIT` as at 1, though a row's largest is
not exactly 1 any more, and is rounded as the others are.

A hidden key's V meets weight 0 in the product, which is not enough if it is infinite or NaN, and
infinities do not survive splitting into TF32: a warp that ends with such a value in a sum computes
its rows again, ``exactly``, key by key. Then it reads more than the closed form says. So it does
where scores are so large, 10**7 and more, that m's rounding made weights vanish.

Tensors are addresses with strides (batch, head, row) in elements; every row is aligned to 16 bytes.
Row r sees the keys r + s - n - left .. r + s - n + right: causal is right = 0, unlimited is n + s.
Each query head loads its own K and V, even where heads share them.

A barrier's comment names what it orders: "write-read", what was written before it is read after it;
"read-write", what was read before it may be overwritten after it. Read ``mma_layout.py`` for the
tiles, ``mma_tiles.py`` for the words.
"""

from __future__ import annotations

from ._cuda import cuda, types, word
from .mma_layout import CHUNK_BYTES, MmaLayout
from .mma_tiles import LOG2E, ONE, SMALLEST, ZERO, quotient, words
from .ptx import (
    anew,
    ballot,
    cp_async_commit,
    cp_async_wait_0,
    fmul,
    i32,
    shared_address,
    u32,
    u64,
    unroll_loops,
)


def flash_mma(layout: MmaLayout, dtype: str):
    """The kernel of this shape. Grid: batch x heads x row tiles, in one dimension."""
    w = words(layout, dtype)
    fetch_Q, fetch_K, fetch_V = w.fetch_Q, w.fetch_K, w.fetch_V
    start_Q, start_K, start_V = w.start_Q, w.start_K, w.start_V
    reset, scores, scale_first, hide = w.reset, w.scores, w.scale_first, w.hide
    raise_maxima, exponentials = w.raise_maxima, w.exponentials
    outgrown, add_tile = w.outgrown, w.add_tile
    accumulate, add_sums, strange, exactly = w.accumulate, w.add_sums, w.strange, w.exactly
    store, store_L = w.store, w.store_L
    FAST = layout.itemsize == 2  # maxima are reused
    Br, Bc, MT, ROWS = layout.block_q, layout.block_k, layout.row_tiles, 16 * layout.row_tiles
    NT, ET, E32 = Bc // 8, layout.e // 8, -(-layout.e // 32)
    ITEM, A_SHAPE = layout.itemsize, w.A_shape
    K0, V0 = layout.Q_bytes, layout.Q_bytes + layout.K_bytes
    STAGE = layout.K_bytes + layout.V_bytes
    Q_PITCH = CHUNK_BYTES * layout.Q_swizzle.chunks

    @word
    def at_row(address, strides, batch, head, row):
        return address + u64((batch * strides[0] + head * strides[1] + row * strides[2]) * ITEM)

    @word
    def place(n, heads, group):
        """The block's batch, head and key head, and its first row: the longest tile first."""
        n, heads, group = i32(anew(u32(n))), i32(anew(u32(heads))), i32(anew(u32(group)))
        Tr, program = quotient(i32(n + (Br - 1)), Br), i32(cuda.blockIdx.x)
        bh = quotient(program, Tr)  # batch and head as one
        batch = quotient(bh, heads)
        head = i32(bh - batch * heads)
        i0 = i32((Tr - 1 - i32(program - bh * Tr)) * Br)
        return batch, head, quotient(head, group), i0

    def flash_mma_kernel(
        q, k, v, O, L, q_strides, k_strides, v_strides, O_strides,
        n, s, d, e, heads, group, left, right, scale, want_L,
    ):  # fmt: skip
        smem = cuda.shared.array(0, types.uint8)
        S = cuda.local.array((MT, NT, 4), types.float32)
        acc = cuda.local.array((MT, ET, 4), types.float32)
        A = cuda.local.array(A_SHAPE, types.uint32)  # mma's left operand
        m = cuda.local.array((MT, 2), types.float32)
        l = cuda.local.array((MT, 2), types.float32)
        sums = cuda.local.array((MT, 2), types.float32)
        base = shared_address(smem)
        tid = i32(cuda.threadIdx.x)
        row0, lane = i32((tid >> 5) * ROWS), i32(tid & 31)  # the warp's first row of the tile

        # Registers are what limits this kernel: 32 bits wherever they are enough, and ``anew``
        # where the compiler would keep what it can have again at no cost.
        n, s, d, e, heads, group = i32(n), i32(s), i32(d), i32(e), i32(heads), i32(group)
        batch, head, kv_head, i0 = place(n, heads, group)
        rows = min(i32(Br), i32(n - i0))
        see_from = i32(anew(u32(i0 + s - n - left)))  # row r of the tile sees the keys
        see_to = i32(anew(u32(i0 + s - n + right)))  # see_from + r .. see_to + r
        j0 = i32(anew(u32(quotient(max(i32(0), see_from), Bc) * Bc)))
        end = i32(anew(u32(min(s, i32(see_to + rows)))))

        q_row, k_row, v_row = (  # in bytes
            u64(q_strides[2] * ITEM), u64(k_strides[2] * ITEM), u64(v_strides[2] * ITEM),
        )  # fmt: skip
        Q_from = at_row(q, q_strides, batch, head, i0) + start_Q(q_row, tid)
        K_from = at_row(k, k_strides, batch, kv_head, j0) + start_K(k_row, tid)
        V_from = at_row(v, v_strides, batch, kv_head, j0) + start_V(v_row, tid)
        fetch_Q(base, Q_from, q_row, rows, d, tid)
        if j0 < end:
            keys = min(i32(Bc), i32(s - j0))
            fetch_K(u32(base + K0), K_from, k_row, keys, d, tid)
            fetch_V(u32(base + V0), V_from, v_row, keys, e, tid)
        cp_async_commit()
        reset(m, l, acc)

        c = fmul(scale, LOG2E)  # P = 2**(S c - m)
        factor = c if c >= SMALLEST else ONE  # else scores are scaled before they are hidden
        stage, opens = u32(0), i32(1)
        while j0 < end:
            cp_async_wait_0()
            cuda.syncthreads()  # write-read: this tile's K and V, at first Q. read-write: the other
            #                     stage, whose tile has been used by every warp
            following = i32(j0 + Bc)
            if following < end:
                tid = i32(anew(u32(cuda.threadIdx.x)))
                K_from += u64(Bc) * k_row
                V_from += u64(Bc) * v_row
                keys = min(i32(Bc), i32(s - following))
                other = u32(base + (STAGE - stage))
                fetch_K(u32(other + K0), K_from, k_row, keys, d, tid)
                fetch_V(u32(other + V0), V_from, v_row, keys, e, tid)
            cp_async_commit()

            keys = min(i32(Bc), i32(s - j0))
            first, last = i32(see_from - j0), i32(see_to - j0)  # counted from the tile's first key
            thread = i32(anew(u32(tid)))
            row0, lane = i32((thread >> 5) * ROWS), i32(thread & 31)
            scores(S, A, u32(base + row0 * Q_PITCH), u32(base + K0 + stage), lane)
            masked = keys < Bc or i32(first + row0) > 1 - ROWS or i32(last + row0) < Bc - 1
            if FAST and not masked and opens == 0 and factor != ONE:  # ONE: S would need scaling
                exponentials(m, sums, S, factor)
                if outgrown(sums):  # m was too small, and S is lost
                    lane = i32(anew(u32(lane)))
                    scores(S, A, u32(base + row0 * Q_PITCH), u32(base + K0 + stage), lane)
                    raise_maxima(m, l, acc, S, factor)
                    exponentials(m, sums, S, factor)
            else:
                opens = i32(0)
                if factor == ONE:
                    scale_first(S, scale)
                if masked:
                    hide(S, first, last, keys, i32(row0 + (lane >> 2)), i32((lane & 3) * 2))
                raise_maxima(m, l, acc, S, factor)
                exponentials(m, sums, S, factor)
            add_tile(l, sums)
            accumulate(acc, A, S, l, u32(base + V0 + stage), i32(anew(u32(lane))))
            stage = u32(STAGE - stage)
            j0 = following

        cp_async_wait_0()
        cuda.syncthreads()  # read-write: Q, whose place O takes. write-write, if no tile was seen

        row0, lane = i32((tid >> 5) * ROWS), i32(tid & 31)
        batch, head, kv_head, i0 = place(n, heads, group)
        rows = min(i32(Br), i32(n - i0))
        O_row = u64(O_strides[2] * ITEM)
        O = at_row(O, O_strides, batch, head, i0)
        L += (u64(batch * heads + head) * u64(n) + u64(i0)) * u64(4)

        add_sums(m, l, factor)
        mark = strange(m, l, acc)
        if ballot(u32(0) if mark == ZERO else u32(1)) == 0:
            store(O, O_row, acc, l, base, row0, rows, e, lane)
            if want_L != 0:
                store_L(L, m, l, i32(row0 + (lane >> 2)), rows, i32(lane & 3))
        else:
            y = cuda.local.array(E32, types.float32)
            q_row = u64(q_strides[2] * ITEM)
            k_row, v_row = u64(k_strides[2] * ITEM), u64(v_strides[2] * ITEM)
            q = at_row(q, q_strides, batch, head, i0)
            k = at_row(k, k_strides, batch, kv_head, i32(0))
            v = at_row(v, v_strides, batch, kv_head, i32(0))
            see_from, see_to = i32(i0 + s - n - left), i32(i0 + s - n + right)
            for r in range(row0, min(rows, row0 + ROWS)):
                exactly(
                    q + u64(r) * q_row, k, v, O + u64(r) * O_row, L + u64(r) * u64(4),
                    k_row, v_row, d, e, max(0, see_from + r), min(s, see_to + r + 1), scale,
                    want_L, y,
                )  # fmt: skip
        unroll_loops()

    return flash_mma_kernel


def signature():
    """The kernel's argument types for Numba: addresses, four triples of strides, numbers."""
    strides = types.UniTuple(types.int64, 3)
    return types.void(
        *[types.uint64] * 5, *[strides] * 4, *[types.int64] * 8, types.float32, types.int64
    )
