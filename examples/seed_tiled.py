"""The first tutorial's two tiled attentions beside ours, and the slips in its printed formulas.

Left: the algorithm for one head. Right: our words for the same step. The tutorial's V1 has
FlashAttention-2's loop order, its V2 FlashAttention-1's. Its code is right, its formulas are not:
l forgets its own past, and the first line for O keeps only the tile before.
Run: python examples/seed_tiled.py. Read next: seed_chunked.py.
"""

import numpy as np

from simattn import attention, exact
from simattn.tiling import seed_rule

SRAM_SIZE = 1024  # elements, as in the tutorial
exp, inf, sqrt = np.exp, np.inf, np.sqrt


# fmt: off
def flashattnV1_block(Q, K, V, Br, Bc, wrong=""):      # q_outer, normalised=False
    (N, d), s, O = Q.shape, len(K), np.zeros((len(Q), V.shape[1]))
    for i in range(0, N, Br):                          # for i in grid.row_tiles():
        q = Q[i:i + Br]                                #     Q = sram.load(hbm.Q[i])
        m, l, o, last = -inf, 0, 0, 0                  #     state = OnlineSoftmax.empty(...)
        for j in range(0, s, Bc):                      #     for j in grid.key_tiles_seen_by(i):
            k_j, v_j = K[j:j + Bc], V[j:j + Bc]        #         K, V = sram.load(...), ...
            S = q @ k_j.T / sqrt(d)                    #         scores(Q, K, scale, visible)
            m_new = np.maximum(m, S.max(axis=1))       #         S.rowmax(self.m)
            c = exp(m - m_new)                         #         c = self.m.shift(m).exp()
            P = exp(S - m_new[:, None])                #         P = S.shift(self.m).exp()
            l = 1 if wrong == "l" else l               #         (printed: e^(m_old - m_new) alone)
            l = l * c + P.sum(axis=1)                  #         l *= c, l.add_rowsum(P)
            o = last if wrong == "O" else o            #         (printed: the tile before alone)
            o = o * c[:, None] + P @ v_j               #         acc *= c, acc.accumulate(P, V)
            m, last = m_new, P @ v_j                   #         self.m = m
        O[i:i + Br] = o / l[:, None]                   #     sram.store(hbm.O[i], state.finish())
    return O


def flashattnV2_blockKVQ(Q, K, V, Br, Bc):             # kv_outer_end
    (N, d), s = Q.shape, len(K)
    m, l = np.full(N, -inf), np.zeros(N)               # for i in ...: store(i, empty state)
    o = np.zeros((N, V.shape[1]))                      #     (m, l and O_undivided in HBM)
    for j in range(0, s, Bc):                          # for j in grid.key_tiles_seen():
        k_j, v_j = K[j:j + Bc], V[j:j + Bc]            #     K, V = sram.load(...), ...
        for i in range(0, N, Br):                      #     for i in grid.row_tiles_that_see(j):
            t = slice(i, i + Br)                       #         Q, state = sram.load(...), load(i)
            S = Q[t] @ k_j.T / sqrt(d)                 #         scores(Q, K, scale, visible)
            m_new = np.maximum(m[t], S.max(axis=1))    #         S.rowmax(self.m)
            c = exp(m[t] - m_new)                      #         c = self.m.shift(m).exp()
            P = exp(S - m_new[:, None])                #         P = S.shift(self.m).exp()
            l[t] = l[t] * c + P.sum(axis=1)            #         l *= c, l.add_rowsum(P)
            o[t] = o[t] * c[:, None] + P @ v_j         #         acc *= c, acc.accumulate(P, V)
            m[t] = m_new                               #         store(i, state)
    return o / l[:, None]                              # for i in ...: O /= l; sram.store(...)
# fmt: on


def main() -> None:
    r = np.random.default_rng(0)
    Q, K, V = (r.standard_normal((50, 8)) for _ in range(3))
    Br, Bc = seed_rule(SRAM_SIZE, 8)
    truth, _ = exact.attention(Q, K, V)
    print(f"50 queries and keys of width 8, tiles of {Br} x {Bc}; errors against exact softmax\n")
    for name, out, ours in (
        ("flashattnV1_block", flashattnV1_block(Q, K, V, Br, Bc), "q_outer"),
        ("  with l as in the formula", flashattnV1_block(Q, K, V, Br, Bc, "l"), None),
        ("  with O as in the formula", flashattnV1_block(Q, K, V, Br, Bc, "O"), None),
        ("flashattnV2_blockKVQ", flashattnV2_blockKVQ(Q, K, V, Br, Bc), "kv_outer_end"),
    ):
        error = np.abs(out - truth).max()
        print(f"{name:<28} {error:8.1e}  {'matches' if error < 1e-14 else 'FAILS'}", end="")
        if ours:
            run = attention(Q, K, V, variant=ours, block_q=Br, block_k=Bc)
            print(f"; ours, {ours}, differs by {np.abs(run.out - out).max():.1e}", end="")
        print()


if __name__ == "__main__":
    main()
