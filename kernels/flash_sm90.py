"""Attention on Hopper (sm_90a): tensor copies, warpgroup products, specialised warps.

The loop order is ``q_outer`` (FlashAttention-2, arXiv 2307.08691, Algorithm 1), the division of
labour FlashAttention-3's (arXiv 2407.08608): a thread that only copies, warpgroups that only
compute, and one block an SM that stays and takes query tiles, *items*, from a table.

============  =================  ================================================================
who           registers          does
============  =================  ================================================================
producer      few: it gives the  one thread: for each item Q, then K and V tile by tile, last tile
              others its own     first; each into the next stage of a ring, when that is empty
consumer      many               64 queries a warpgroup: S = Q K^T, softmax, acc += P V, O
============  =================  ================================================================

======  ===============================  ============================  ===========================
buffer  where                            written by                    read by
======  ===============================  ============================  ===========================
Q       shared, stages x [Br, d]         tensor copies                 S = Q K^T
K, V    shared, stages x [Bc, d or e]    tensor copies                 S = Q K^T, acc += P V
slots   shared, an item each             producer                      consumers: row, head, batch
S       registers [64, Bc] of 4 warps    S = Q K^T                     softmax
P       registers, 16 bits               round_P                       acc += P V, as its left side
acc     registers [64, e]                acc += P V, rescale           store
m, l    registers, 2 rows a lane         weigh                         the next tile; store
O       shared, 16 rows a warp           stage_rows                    tensor copies, to memory
marks   shared, a word a warp            store                         at the end: repair
======  ===============================  ============================  ===========================

============  ===================  ==========  ===================================================
mbarrier      arrivals             waits       orders
============  ===================  ==========  ===================================================
full Q, K, V  the producer and     consumers   write-read: what was copied (and Q's slot)
              the copies' bytes
empty Q, K,V  one of each warp     producer    read-write: what is copied over (and an old slot)
============  ===================  ==========  ===================================================

**The loop.** A tile's S comes while the tile before is still to be multiplied with V, so that both
products are given to the tensor cores together, and softmax works on S while P V runs. Named
barriers let one warpgroup at a time issue products: while it has the tensor cores, the others have
the exponentials. Items follow each other without a pause: the first S of an item is issued with the
last P V of the one before, which is stored while the tensor cores go on. A warpgroup whose rows of
an item are all past the last one sits it out: it passes its turns on, and releases each stage.

**Maxima.** Softmax is the same for any m, if 2**(S c - m) neither overflows nor vanishes. So a tile
that every row sees is weighed with the maxima of the tiles before, unseen; only if a lane's sum
passes `LIMIT` does its warp compute the tile again, with new maxima. It cannot repeat the product,
as wgmma is a warpgroup's: it uses mma.sync. The result differs by rounding alone: P has as many
bits at `LIMIT` as at 1, though a row's largest is not exactly 1 any more, and is rounded as the
others are. ``maxima="exact"`` in the layout compiles the online softmax.

**Hidden keys.** Tiles in which some row sees some keys only, and every first tile, take the exact
way. A hidden key has P = 0, which is not enough if its V is infinite or NaN, as in `flash_mma`: a
warp whose rows come out so leaves a mark, and in the end computes those rows again, key by key. So
it does where scores are so large, 10**7 and more, that m's rounding made weights vanish.

Tensors come twice: as tensor maps of [batch, head, row, column], boxes of 64 columns and Br, Bc,
Bc and 16 rows, for the copies; as addresses with strides (batch, head, row) in elements for those
rows. Row r sees the keys r + s - n - left .. r + s - n + right.

Read next: ``sm90_tiles.py``, the words.
"""

from __future__ import annotations

from ._cuda import cuda, types, word
from .mma_tiles import LIMIT, LOG2E, NAN, ZERO, log_sum, quotient, vanished
from .ptx import (
    anew,
    ballot,
    bar_arrive,
    bar_sync,
    fadd,
    fmul,
    i32,
    ld_global_b32,
    ld_global_b32_written,
    ld_shared_b32,
    ld_shared_v4,
    rcp,
    shared_address,
    shfl_idx,
    shfl_xor,
    st_global_f32,
    st_shared_b32,
    st_shared_v4,
    u32,
    u64,
    unroll_loops,
)
from .ptx_hopper import (
    bulk_commit,
    bulk_wait,
    bulk_wait_read,
    fence_async,
    mbar_arrive,
    mbar_expect,
    mbar_init,
    mbar_init_fence,
    mbar_wait,
    setmaxnreg,
    tma_load_4d,
    tma_prefetch_4d,
    tma_store_4d,
)
from .sm90_layout import BLOCK_COLUMNS, GROUP_ROWS, ROW_BYTES, WARP_ROWS, Sm90Layout
from .sm90_schedule import END
from .sm90_tiles import SHORT, words

PAIR = 256  # threads at a named barrier: who had the tensor cores, and who is next


def flash_sm90(layout: Sm90Layout, dtype: str):
    """The kernel of this shape. Grid: as many blocks as the schedule has rows."""
    w = words(layout, dtype)
    begin_scores, begin_output, scores_again = w.begin_scores, w.begin_output, w.scores_again
    wait_first_S, wait_S, wait_acc = w.wait_first_S, w.wait_S, w.wait_acc
    reset, clear, factor_for, weigh, look = w.reset, w.clear, w.factor_for, w.weigh, w.look
    exponentials, round_P, rescale = w.exponentials, w.round_P, w.rescale
    stage_rows, exactly, fma_x2 = w.stage_rows, w.exactly, SHORT[dtype][1]
    stores_read, stores_done = bulk_wait_read(0), bulk_wait(0)
    give_registers = setmaxnreg("dec", layout.producer_registers)
    take_registers = setmaxnreg("inc", layout.consumer_registers)
    Br, Bc, G, WARPS = layout.block_q, layout.block_k, layout.groups, 4 * layout.groups
    NT, EARLY = Bc // 8, layout.early
    S_SIZE, P_SIZE, O_SIZE, E32 = Bc // 2, Bc // 4, layout.e // 2, -(-layout.e // 32)
    FAST, KEEPS_Q = layout.maxima == "fast", layout.d <= 192  # wider, there is no register for it
    SITS_OUT = layout.sits_out
    Q_STAGES, STAGES, N_SLOTS = layout.q_stages, layout.stages, layout.slots
    DB, EB, OB = layout.d_blocks, layout.e_blocks, layout.O_blocks
    Q_BYTES, K_BYTES, V_BYTES = layout.Q_bytes, layout.K_bytes, layout.V_bytes
    Q_BLOCK, K_BLOCK = Br * ROW_BYTES, Bc * ROW_BYTES  # of a column block, V's as K's
    GROUP_BLOCK, WARP_BLOCK = GROUP_ROWS * ROW_BYTES, WARP_ROWS * ROW_BYTES
    K0, V0, O0 = layout.K_start, layout.V_start, layout.O_start
    SLOTS, MARKS = layout.slots_start, layout.marks_start
    FULL_Q = layout.barriers_start
    EMPTY_Q = FULL_Q + 8 * Q_STAGES
    FULL_K = EMPTY_Q + 8 * Q_STAGES
    FULL_V, EMPTY_K, EMPTY_V = (FULL_K + 8 * STAGES * i for i in (1, 2, 3))

    @word
    def after(stage, turn, stages):
        """The next stage of a ring, and its turn: the parity of its mbarriers' phase."""
        following = i32(stage + 1)
        if following == stages:
            return i32(0), i32(turn ^ 1)
        return following, turn

    @word
    def barrier(base, start, stage):
        """A stage's mbarrier."""
        return u32(u32(base + 8 * stage) + u32(start))

    @word
    def after_slot(slot):
        following = i32(slot + 1)
        return following if following < N_SLOTS else i32(0)

    @word
    def tiles(i0, n, s, left, right):
        """The key tiles, first .. end - 1, that the queries from row i0 on see.

        Queries that see nothing get one past the end: zeros, which no copy fetches, and hidden.
        """
        begin = max(i32(0), i32(i0 + s - n - left))
        end = min(s, i32(i0 + s - n + right + min(i32(Br), i32(n - i0))))
        if end <= begin:
            blind = quotient(i32(anew(u32(s))), Bc)  # of no use to other items: keep no register
            return i32(blind + 1), i32(blind + 2)
        return quotient(begin, Bc), quotient(i32(end + (Bc - 1)), Bc)

    # ---- the producer

    @word
    def item(entry, n, heads):
        """Row, head and batch of an entry of the table; row -1 after the last."""
        index = ld_global_b32(entry)
        if index == u32(END):
            return i32(-1), i32(0), i32(0)
        Tr = u32(quotient(i32(n + (Br - 1)), Br))
        bh = u32(index // Tr)
        batch = u32(bh // u32(heads))
        return i32(u32(index - bh * Tr) * u32(Br)), i32(bh - batch * u32(heads)), i32(batch)

    @word
    def copy_tile(base, K_map, V_map, row, head, batch, stage, turn):
        """K and V from this row on, each as soon as its stage is empty."""
        full_K, full_V = barrier(base, FULL_K, stage), barrier(base, FULL_V, stage)
        mbar_wait(barrier(base, EMPTY_K, stage), turn)  # read-write: K of a tile before
        mbar_expect(full_K, K_BYTES)
        for b in range(DB):
            at = u32(base + K0 + stage * K_BYTES + b * K_BLOCK)
            tma_load_4d(at, K_map, b * BLOCK_COLUMNS, row, head, batch, full_K)
        mbar_wait(barrier(base, EMPTY_V, stage), turn)  # read-write: V of a tile before
        mbar_expect(full_V, V_BYTES)
        for b in range(EB):
            at = u32(base + V0 + stage * V_BYTES + b * K_BLOCK)
            tma_load_4d(at, V_map, b * BLOCK_COLUMNS, row, head, batch, full_V)
        unroll_loops()

    @word
    def copy_ahead(Q_map, K_map, V_map, i0, row, head, kv_head, batch):
        """To the L2 cache: an item's Q, and a tile of K and V."""
        for b in range(DB):
            tma_prefetch_4d(Q_map, b * BLOCK_COLUMNS, i0, head, batch)
            tma_prefetch_4d(K_map, b * BLOCK_COLUMNS, row, kv_head, batch)
        for b in range(EB):
            tma_prefetch_4d(V_map, b * BLOCK_COLUMNS, row, kv_head, batch)
        unroll_loops()

    @word
    def produce(base, Q_map, K_map, V_map, entry, n, s, heads, group, left, right):
        """One thread: keep every stage full, in the order in which the consumers use them."""
        q_stage, q_turn = i32(0), i32(1)  # of "empty": that which was before the first is over
        stage, turn = i32(0), i32(1)
        slot = i32(0)
        i0, head, batch = item(entry, n, heads)
        while i0 >= 0:
            full_Q = barrier(base, FULL_Q, q_stage)
            mbar_wait(barrier(base, EMPTY_Q, q_stage), q_turn)  # read-write: Q, and an old slot
            st_shared_v4(u32(base + SLOTS + 16 * slot), i0, head, batch, 0)
            mbar_expect(full_Q, Q_BYTES)
            for b in range(DB):
                at = u32(base + q_stage * Q_BYTES + b * Q_BLOCK)
                tma_load_4d(at, Q_map, b * BLOCK_COLUMNS, i0, head, batch, full_Q)
            q_stage, q_turn = after(q_stage, q_turn, Q_STAGES)
            slot = after_slot(slot)
            first, t = tiles(i0, n, s, left, right)
            kv_head, kv_batch = quotient(head, group), batch
            t = i32(t - 1)
            copy_tile(base, K_map, V_map, i32(t * Bc), kv_head, kv_batch, stage, turn)
            stage, turn = after(stage, turn, STAGES)

            entry += u64(4)  # the next item: while it is far away, its share of the head's K and V
            i0, head, batch = item(entry, n, heads)
            if i0 >= 0:
                share = i32(quotient(max(i32(0), i32(i0 + s - n)), Bc) * Bc)
                copy_ahead(Q_map, K_map, V_map, i0, share, head, quotient(head, group), batch)
            while t > first:
                t = i32(t - 1)
                copy_tile(base, K_map, V_map, i32(t * Bc), kv_head, kv_batch, stage, turn)
                stage, turn = after(stage, turn, STAGES)
        mbar_wait(barrier(base, EMPTY_Q, q_stage), q_turn)  # read-write: an old slot
        st_shared_v4(u32(base + SLOTS + 16 * slot), i0, 0, 0, 0)
        mbar_arrive(barrier(base, FULL_Q, q_stage))
        unroll_loops()

    # ---- consumers: what they wait for, and whom they let go on

    @word
    def take(base, q_stage, q_turn, slot, n, s, left, right):
        """Wait for an item: its first row, and its key tiles."""
        mbar_wait(barrier(base, FULL_Q, q_stage), q_turn)  # write-read: Q, and the slot
        i0, _, _, _ = ld_shared_v4(u32(base + SLOTS + 16 * slot))
        i0 = i32(shfl_idx(i0, 0))  # from one lane: then the compiler knows that all have the same
        first, end = tiles(i0, n, s, left, right)
        return i0, first, end

    @word
    def release(mbarrier, lane):
        """The warp has used what the mbarrier guards."""
        if lane == 0:
            mbar_arrive(mbarrier)

    @word
    def take_next(base, q_stage, q_turn, slot, n, s, left, right, lane):
        """Release an item's Q, and take the next item: where its Q and slot are, and the same."""
        release(barrier(base, EMPTY_Q, q_stage), lane)
        q_stage, q_turn = after(q_stage, q_turn, Q_STAGES)
        slot = after_slot(slot)
        i0, first, end = take(base, q_stage, q_turn, slot, n, s, left, right)
        return q_stage, q_turn, slot, i0, first, end

    @word
    def await_turn(warp):
        """Wait until the tensor cores are this warpgroup's: the one before has issued."""
        bar_sync(u32(1 + (anew(u32(warp)) >> 2)), PAIR)

    @word
    def pass_turn(warp):
        """They are the next one's."""
        following = u32((anew(u32(warp)) >> 2) + 1)
        bar_arrive(u32(1 + (following if following < G else 0)), PAIR)

    @word
    def Q_in(Q, q_stage):
        """The address of a stage of Q; where registers are scarce, computed again for each tile."""
        return u32((Q if KEEPS_Q else anew(Q)) + q_stage * (Q_BYTES >> 4))

    @word
    def group_row(warp):
        """The first of its warpgroup, of a query tile."""
        return i32(u32(anew(u32(warp)) >> u32(2)) * u32(GROUP_ROWS))

    @word
    def is_past(i0, n, warp):
        """Whether the item that begins at row i0 has no row for this warpgroup."""
        return SITS_OUT and i32(i0 + group_row(warp)) >= n

    @word
    def sit_out(base, stage, warp, lane):
        """A tile's turn and releases for a warpgroup without rows, and none of its work."""
        await_turn(warp)  # read-write: all have released what was here a ring ago
        pass_turn(warp)
        release(barrier(base, EMPTY_K, stage), lane)
        release(barrier(base, EMPTY_V, stage), lane)

    @word
    def first_row(warp):
        """The warp's, of a query tile."""
        return i32(anew(u32(warp)) * u32(WARP_ROWS))

    # ---- the output

    @word
    def inverse(m, l):
        """1 / l; 0 if the row saw nothing; NaN, which leaves a mark, if its weights vanished."""
        usual = ZERO if l == ZERO else rcp(l)
        return NAN if vanished(m, l) else usual

    @word
    def send(O_map, staging, first, row, head, batch):
        """Begin to store ``OB`` column blocks; rows past n and columns past e are left out."""
        for b in range(OB):
            if first + b < EB:
                at = u32(staging + b * WARP_BLOCK)
                tma_store_4d(O_map, (first + b) * BLOCK_COLUMNS, row, head, batch, at)
        bulk_commit()
        unroll_loops()

    @word
    def store(O_map, L, base, slot, acc, m, l, n, heads, want_L, warp, lane):
        """O = acc / l and L of this warp's rows; a mark if a value is NaN or infinite."""
        warp, lane = i32(anew(u32(warp))), i32(anew(u32(lane)))
        i0, head, batch, _ = ld_shared_v4(u32(base + SLOTS + 16 * slot))
        i0, head, batch = i32(i0 + u32(warp * WARP_ROWS)), i32(head), i32(batch)
        staging = u32(base + O0 + warp * (OB * WARP_BLOCK))
        for h in range(2):
            part = fadd(l[h], shfl_xor(l[h], 1))
            l[h] = fadd(part, shfl_xor(part, 2))
        inverse0, inverse1 = inverse(m[0], l[0]), inverse(m[1], l[1])
        strange = u32(0)
        for first in range(0, EB, OB):
            if lane == 0:
                stores_read()
            cuda.syncwarp()  # read-write: what was sent before
            strange |= stage_rows(acc, inverse0, inverse1, staging, first, lane)
            fence_async()  # write-read, by the copy
            cuda.syncwarp()  # write-read: the rows of all lanes
            if lane == 0:
                send(O_map, staging, first, i0, head, batch)
        if want_L != 0:
            L += (u64(batch) * u64(heads) + u64(head)) * u64(n) * u64(4)
            for h in range(2):
                row = i32(i0 + (lane >> 2) + 8 * h)
                if (lane & 3) == 0 and row < n:
                    st_global_f32(L + u64(row) * u64(4), log_sum(m[h], l[h]))
        if ballot(strange) != 0 and lane == 0:
            st_shared_b32(u32(base + MARKS + 4 * warp), 1)
        unroll_loops()

    @word
    def is_strange(O_row, e, lane):
        """Whether a stored row has a NaN or an infinity."""
        mark = u32(0)
        for u in range(0, E32, 2):
            if 32 * u + 2 * lane < e:
                mark = fma_x2(ld_global_b32_written(O_row + u64(64 * u + 4 * lane)), 0, mark)
        unroll_loops()
        return ballot(u32(mark & 0x7FFF7FFF)) != 0

    @word
    def repair(
        entry, row0, lane, tensors, strides, L, n, s, d, e, heads, group, left, right, scale,
        want_L, y,
    ):  # fmt: skip
        """Of all that the warp has stored, the strange rows again, key by key."""
        q, k, v, O = tensors
        q_strides, k_strides, v_strides, O_strides = strides
        i0, head, batch = item(entry, n, heads)
        while i0 >= 0:
            kv_head = quotient(head, group)
            k_head = k + u64(batch * k_strides[0] + kv_head * k_strides[1]) * u64(2)
            v_head = v + u64(batch * v_strides[0] + kv_head * v_strides[1]) * u64(2)
            for i in range(i0 + row0, min(n, i0 + row0 + WARP_ROWS)):
                q_at = batch * q_strides[0] + head * q_strides[1] + i * q_strides[2]
                O_at = batch * O_strides[0] + head * O_strides[1] + i * O_strides[2]
                L_at = (batch * heads + head) * n + i
                if is_strange(O + u64(O_at) * u64(2), e, lane):
                    cuda.syncwarp()  # read-write: the row
                    exactly(
                        q + u64(q_at) * u64(2), k_head, v_head, O + u64(O_at) * u64(2),
                        L + u64(L_at) * u64(4), u64(k_strides[2] * 2), u64(v_strides[2] * 2), d, e,
                        max(0, i + s - n - left), min(s, i + s - n + right + 1), scale, want_L, y,
                    )  # fmt: skip
            entry += u64(4)
            i0, head, batch = item(entry, n, heads)

    # ---- the kernel

    def flash_sm90_kernel(
        Q_map, K_map, V_map, O_map, schedule, length,
        q, k, v, O, L, q_strides, k_strides, v_strides, O_strides,
        n, s, d, e, heads, group, left, right, scale, want_L,
    ):  # fmt: skip
        smem = cuda.shared.array(0, types.uint8)
        base = u32((shared_address(smem) + u32(1023)) & u32(0xFFFFFC00))
        tid = i32(cuda.threadIdx.x)
        lane = i32(tid & 31)
        warp = i32(shfl_idx(u32(tid >> 5), 0))  # from one lane, as in ``take``
        warpgroup = i32(warp >> 2)
        n, s, heads, group = i32(n), i32(s), i32(heads), i32(group)
        left, right = i32(left), i32(right)
        if tid == 0:
            for i in range(Q_STAGES):
                mbar_init(barrier(base, FULL_Q, i), 1)
                mbar_init(barrier(base, EMPTY_Q, i), WARPS)
            for i in range(2 * STAGES):
                mbar_init(barrier(base, FULL_K, i), 1)  # and V's
                mbar_init(barrier(base, EMPTY_K, i), WARPS)
            for i in range(WARPS):
                st_shared_b32(u32(base + MARKS + 4 * i), 0)
            mbar_init_fence()
        cuda.syncthreads()  # write-read: mbarriers and marks

        if warpgroup == G:
            give_registers()
            if warp == WARPS and lane == 0:
                entry = schedule + u64(cuda.blockIdx.x) * u64(length) * u64(4)
                produce(base, Q_map, K_map, V_map, entry, n, s, heads, group, left, right)
        else:
            take_registers()
            S = cuda.local.array(S_SIZE, types.float32)
            P = cuda.local.array(P_SIZE, types.uint32)
            acc = cuda.local.array(O_SIZE, types.float32)
            sums = cuda.local.array(4, types.float32)
            m = cuda.local.array(2, types.float32)
            l = cuda.local.array(2, types.float32)
            shrink = cuda.local.array(2, types.float32)
            m_before = cuda.local.array(2, types.float32)
            l_before = cuda.local.array(2, types.float32)
            y = cuda.local.array(E32, types.float32)
            chunks = u32(u32(base) >> u32(4))  # products count addresses in chunks of 16 bytes
            Q = u32(chunks + warpgroup * (GROUP_BLOCK >> 4))
            if KEEPS_Q:  # from one lane, as in ``take``: else it is computed again for each tile
                Q = u32(shfl_idx(Q, 0))
            K, V = u32(chunks + (K0 >> 4)), u32(chunks + (V0 >> 4))
            c = fmul(scale, LOG2E)  # P = 2**(S c - m)
            if warpgroup == G - 1:
                pass_turn(warp)

            q_stage, q_turn, slot = i32(0), i32(0), i32(0)
            stage, turn, held = i32(0), i32(0), i32(0)
            i0, first, t = take(base, q_stage, q_turn, slot, n, s, left, right)
            while i0 >= 0:
                if is_past(i0, n, warp):  # a tile of an item without rows for this warpgroup
                    sit_out(base, stage, warp, lane)
                    stage, turn = after(stage, turn, STAGES)
                    t = i32(t - 1)
                    if t == first:
                        q_stage, q_turn, slot, i0, first, t = take_next(
                            base, q_stage, q_turn, slot, n, s, left, right, lane
                        )
                    continue

                # The first tile: there is no P yet. After it, and after each tile below, P is in
                # hand, its V in stage ``held``, and the next K and V come in ``stage``.
                mbar_wait(barrier(base, FULL_K, stage), turn)  # write-read: K
                await_turn(warp)
                begin_scores(S, Q_in(Q, q_stage), u32(K + stage * (K_BYTES >> 4)))
                pass_turn(warp)
                wait_first_S(S)
                release(barrier(base, EMPTY_K, stage), lane)
                t = i32(t - 1)
                reset(m, l)
                row, key = i32(i0 + first_row(warp)), i32(t * Bc)
                look(S, m, l, shrink, row, key, n, s, left, right, scale, lane)
                mbar_wait(barrier(base, FULL_V, stage), turn)  # write-read: V
                round_P(P, S)
                clear(acc)
                held = stage
                stage, turn = after(stage, turn, STAGES)

                while True:
                    # The tiles that all rows of the warpgroup see are ``begin`` .. ``end`` - 1.
                    see = i32(i0 + group_row(warp) + s - n)
                    whole = max(i32(0), i32(see - left + (GROUP_ROWS - 1 + Bc - 1)))
                    begin = max(first, quotient(whole, Bc))
                    end = quotient(max(i32(0), min(s, i32(see + right + 1))), Bc)
                    begin = begin if t <= end else t
                    while FAST and begin < t:
                        mbar_wait(barrier(base, FULL_K, stage), turn)  # write-read: K
                        await_turn(warp)
                        begin_scores(S, Q_in(Q, q_stage), u32(K + stage * (K_BYTES >> 4)))
                        begin_output(acc, P, u32(V + held * (V_BYTES >> 4)))
                        pass_turn(warp)
                        wait_S(S)
                        t = i32(t - 1)
                        for i in range(4):
                            sums[i] = ZERO
                        exponentials(S, sums, 0, EARLY, m[0], m[1], c)
                        # write-read: V. Here and not later, as ptxas moves no wait across another:
                        # it would put wait_acc above the exponentials, and P V would run alone.
                        mbar_wait(barrier(base, FULL_V, stage), turn)
                        wait_acc(acc)
                        release(barrier(base, EMPTY_V, held), lane)
                        exponentials(S, sums, EARLY, NT, m[0], m[1], c)
                        round_P(P, S)
                        part0, part1 = fadd(sums[0], sums[1]), fadd(sums[2], sums[3])
                        if ballot(u32(1) if part0 > LIMIT or part1 > LIMIT else u32(0)) == 0:
                            l[0] = fadd(l[0], part0)
                            l[1] = fadd(l[1], part1)
                        else:  # the old maxima were too small
                            rows = u32(base + q_stage * Q_BYTES + first_row(warp) * ROW_BYTES)
                            scores_again(S, rows, u32(base + K0 + stage * K_BYTES), lane)
                            cuda.syncwarp()  # read-write: K and Q, of all lanes
                            weigh(S, m, l, shrink, factor_for(S, scale))
                            rescale(acc, shrink)
                            round_P(P, S)
                        release(barrier(base, EMPTY_K, stage), lane)
                        held = stage
                        stage, turn = after(stage, turn, STAGES)

                    # Another tile; after an item's last one, the first of the next.
                    opens = t == first
                    slot_before = slot
                    for h in range(2):
                        m_before[h], l_before[h] = m[h], l[h]
                    if opens:
                        q_stage, q_turn, slot, i0, first, t = take_next(
                            base, q_stage, q_turn, slot, n, s, left, right, lane
                        )
                        if i0 < 0 or is_past(i0, n, warp):
                            break
                        reset(m, l)
                    mbar_wait(barrier(base, FULL_K, stage), turn)  # write-read: K
                    await_turn(warp)
                    begin_scores(S, Q_in(Q, q_stage), u32(K + stage * (K_BYTES >> 4)))
                    begin_output(acc, P, u32(V + held * (V_BYTES >> 4)))
                    pass_turn(warp)
                    wait_S(S)
                    release(barrier(base, EMPTY_K, stage), lane)
                    t = i32(t - 1)
                    row, key = i32(i0 + first_row(warp)), i32(t * Bc)
                    look(S, m, l, shrink, row, key, n, s, left, right, scale, lane)
                    mbar_wait(barrier(base, FULL_V, stage), turn)  # write-read: V
                    wait_acc(acc)
                    release(barrier(base, EMPTY_V, held), lane)
                    if opens:
                        store(
                            O_map, L, base, slot_before, acc, m_before, l_before, n, heads, want_L,
                            warp, lane,
                        )  # fmt: skip
                        clear(acc)
                    else:
                        rescale(acc, shrink)
                    round_P(P, S)
                    held = stage
                    stage, turn = after(stage, turn, STAGES)

                # No item follows: the last P V alone.
                begin_output(acc, P, u32(V + held * (V_BYTES >> 4)))
                wait_acc(acc)
                release(barrier(base, EMPTY_V, held), lane)
                store(
                    O_map, L, base, slot_before, acc, m_before, l_before, n, heads, want_L, warp,
                    lane,
                )  # fmt: skip
            if warpgroup == 0:
                await_turn(warp)  # which the last warpgroup has passed on
            if lane == 0:
                stores_done()
            cuda.syncwarp()  # write-read: O, and the mark
            if ld_shared_b32(u32(base + MARKS + 4 * warp)) != 0:
                entry = schedule + u64(anew(u32(cuda.blockIdx.x))) * u64(length) * u64(4)
                repair(
                    entry, first_row(warp), lane, (q, k, v, O),
                    (q_strides, k_strides, v_strides, O_strides), L, n, s, d, e, heads, group, left,
                    right, scale, want_L, y,
                )  # fmt: skip
        unroll_loops()

    return flash_sm90_kernel


def signature():
    """The kernel's argument types for Numba: addresses, four triples of strides, numbers."""
    strides = types.UniTuple(types.int64, 3)
    return types.void(
        *[types.uint64] * 5, types.int64, *[types.uint64] * 5, *[strides] * 4, *[types.int64] * 8,
        types.float32, types.int64,
    )  # fmt: skip
