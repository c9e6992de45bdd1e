"""The second tutorial's chunked FlashAttention beside ours, and the rows that it drops.

Left: the algorithm for one batch item in plain NumPy. Right: our words for the same step. It cuts
the rows into chunks of ``n // chunks``, so that the last n mod chunks rows are never visited. Ours
takes rows per tile, ceil(n / chunks): all rows, in as many chunks or fewer. The tutorial leaves out
1/sqrt(d), which is ``scale=1`` here; and its O(N) is memory, for arithmetic stays O(N^2 d).
Run: python examples/seed_chunked.py. Read next: seed_rows.py.
"""

import numpy as np

from simattn import attention, exact

Q_CHUNKS, K_CHUNKS = 4, 3
exp, inf = np.exp, np.inf


# fmt: off
def chunked(Q, K, V):                                  # q_outer, normalised=False
    q_size = len(Q) // Q_CHUNKS                        # WRONG unless the division is exact
    k_size = len(K) // K_CHUNKS                        # WRONG likewise
    outputs = []
    for i in range(Q_CHUNKS):                          # for i in grid.row_tiles():
        q = Q[i * q_size:(i + 1) * q_size]             #     Q = sram.load(hbm.Q[i])
        m, l, o = -inf, 0, 0                           #     state = OnlineSoftmax.empty(...)
        for j in range(K_CHUNKS):                      #     for j in grid.key_tiles_seen_by(i):
            part = slice(j * k_size, (j + 1) * k_size)
            k_j, v_j = K[part], V[part]                #         K, V = sram.load(...), ...
            S = q @ k_j.T                              #         scores(Q, K, scale=1, visible)
            m_new = np.maximum(m, S.max(axis=1))       #         S.rowmax(self.m)
            P = exp(S - m_new[:, None])                #         P = S.shift(self.m).exp()
            c = exp(m - m_new)                         #         c = self.m.shift(m).exp()
            l = l * c + P.sum(axis=1)                  #         l *= c, l.add_rowsum(P)
            o = o * c[:, None] + P @ v_j               #         acc *= c, acc.accumulate(P, V)
            m = m_new                                  #         self.m = m
        outputs.append(o / l[:, None])                 #     sram.store(hbm.O[i], state.finish())
    return np.concatenate(outputs)
# fmt: on


def ceil_div(rows: int, chunks: int) -> int:
    return -(-rows // chunks)


def verdict(out: np.ndarray, truth: np.ndarray) -> str:
    error = np.abs(out - truth[: len(out)]).max()
    good = len(out) == len(truth) and error < 1e-13
    return f"{len(out):>5} {error:>9.1e}  {'matches' if good else 'FAILS':<8}"


def main() -> None:
    r = np.random.default_rng(0)
    print(f"{Q_CHUNKS} query chunks, {K_CHUNKS} key chunks, width 10, values of width 6, scale 1")
    print("Errors are against exact softmax, over the rows that are there.\n")
    print("                as printed, n // chunks    ours, tiles of ceil(n / chunks) rows")
    print("queries  keys    rows     error             rows     error           tiles    chunks")
    for n, s in ((12, 12), (13, 12), (12, 13), (13, 13), (9, 12)):
        Q, K = (r.standard_normal((rows, 10)) for rows in (n, s))
        V = r.standard_normal((s, 6))
        truth, _ = exact.attention(Q, K, V, scale=1.0)
        Br, Bc = ceil_div(n, Q_CHUNKS), ceil_div(s, K_CHUNKS)
        run = attention(Q, K, V, scale=1.0, variant="q_outer", block_q=Br, block_k=Bc)
        chunks = f"{ceil_div(n, Br)} x {ceil_div(s, Bc)}"
        print(
            f"{n:>7} {s:>5}   {verdict(chunked(Q, K, V), truth)}   {verdict(run.out, truth)}"
            f"  {Br} x {Bc}     {chunks}"
        )


if __name__ == "__main__":
    main()
