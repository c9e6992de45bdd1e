"""The first tutorial's two untiled attentions beside ours, and the slip in the second.

Left: the algorithm for one head, a query and a key at a time. Right: our words for the same
step, from ``simattn/variants.py`` and ``simattn/softmax.py``; tiles of one row make it untiled.
Only ours says what moves.
Run: python examples/seed_untiled.py. Read next: seed_tiled.py.
"""

import numpy as np

from simattn import attention, exact

exp, inf, sqrt = np.exp, np.inf, np.sqrt


# fmt: off
def flashattn_naiveQKV(Q, K, V):                    # q_outer, normalised=True
    (N, d), s, O = Q.shape, len(K), np.zeros((len(Q), V.shape[1]))
    for k in range(N):                              # for i in grid.row_tiles():
        q = Q[k]                                    #     Q = sram.load(hbm.Q[i])
        m, l, o = -inf, 0.0, 0.0 * O[k]             #     state = OnlineSoftmax.empty(...)
        for i in range(s):                          #     for j in grid.key_tiles_seen_by(i):
            k_i, v_i = K[i], V[i]                   #         K, V = sram.load(...), sram.load(...)
            x = q @ k_i / sqrt(d)                   #         scores(Q, K, scale, visible)
            m_i = max(m, x)                         #         m = S.rowmax(self.m)
            c, p = exp(m - m_i), exp(x - m_i)       #         c = ..., P = S.shift(self.m).exp()
            l_i = l * c + p                         #         l *= c, then l.add_rowsum(P)
            o = (o * l * c + p * v_i) / l_i         #         acc *= l, accumulate(P, V), acc /= l
            m, l = m_i, l_i                         #         (the state is updated in place)
        O[k] = o                                    #     sram.store(hbm.O[i], state.finish())
    return O


def flashattn_naiveKVQ(Q, K, V, printed=False):     # _kv_outer, normalised=True
    (N, d), s = Q.shape, len(K)
    m, l = np.full(N, -inf), np.zeros(N)            # for i in ...: store(i, empty state)
    o = np.zeros((N, V.shape[1]))                   #     (m, l and O in HBM)
    for i in range(s):                              # for j in grid.key_tiles_seen():
        k_i, v_i = K[i], V[i]                       #     K, V = sram.load(...), sram.load(...)
        for k in range(N):                          #     for i in grid.row_tiles_that_see(j):
            q = Q[k]                                #         Q = sram.load(hbm.Q[i])
            x = q @ k_i / sqrt(d)                   #         scores(Q, K, scale, visible)
            m_i = max(m[k], x)                      #         state = load(i); S.rowmax(self.m)
            c, p = exp(m[k] - m_i), exp(x - m_i)    #         c = ..., P = S.shift(self.m).exp()
            l_i = l[k] * c + p                      #         l *= c, then l.add_rowsum(P)
            old = l[k] if printed else o[k]         #         WRONG as printed: l0[k], not o0[k]
            o_i = (old * l[k] * c + p * v_i) / l_i  #         acc *= l, accumulate(P, V), acc /= l
            m[k], l[k], o[k] = m_i, l_i, o_i        #         store(i, state)
    return o                                        # (hbm.O is already divided)
# fmt: on


def main() -> None:
    r = np.random.default_rng(0)
    Q, K, V = (r.standard_normal((20, 8)) for _ in range(3))
    truth, _ = exact.attention(Q, K, V)
    print("20 queries and keys of width 8, one row at a time; errors against exact softmax\n")
    for name, out, ours in (
        ("flashattn_naiveQKV", flashattn_naiveQKV(Q, K, V), "q_outer_each"),
        ("flashattn_naiveKVQ, printed", flashattn_naiveKVQ(Q, K, V, printed=True), None),
        ("flashattn_naiveKVQ, o0[k] for l0[k]", flashattn_naiveKVQ(Q, K, V), "kv_outer"),
    ):
        error = np.abs(out - truth).max()
        print(f"{name:<36} {error:8.1e}  {'matches' if error < 1e-14 else 'FAILS'}")
        if ours:
            run = attention(Q, K, V, variant=ours, block_q=1, block_k=1)
            same, moved = np.abs(run.out - out).max(), run.traffic
            print(f"  ours, {ours}: differs by {same:.1e}; elements read "
                  f"{moved.total_read_elems}, written {moved.total_write_elems}")  # fmt: skip


if __name__ == "__main__":
    main()
