"""Every algorithm of the two tutorials, run by ours at the tutorials' own sizes.

The first tutorial names no input, only SRAM_SIZE = 1024 elements: here a batch of 2, 50 rows, width
8. The second has a batch of 1, 12 rows, width 10, in 4 query and 3 key chunks, and no 1/sqrt(d).
Batch items take the place of heads: both are independent programs, and totals add up.
Run: python examples/seed_rows.py. Read next: loop_orders.py.
"""

import numpy as np

from simattn import Run, attention, exact, row_softmax
from simattn.tiling import best, paper_rule, seed_rule

SRAM_SIZE = 1024  # elements
BATCH, N, D = 2, 50, 8
R = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return R.standard_normal(shape, dtype=np.float32)


def line(row: int, what: str, run: Run, truth: np.ndarray) -> int:
    """Print a row of the table; returns the elements moved."""
    error, tiles = np.abs(run.out - truth).max(), f"{run.block_q} x {run.block_k}"
    traffic = run.traffic
    print(
        f"{row:>3}  {what:<36} {run.variant:<13} {tiles:>7} {error:>8.0e}"
        f" {'yes' if run.as_predicted else 'NO':>5}"
        f" {traffic.total_read_elems:>7} {traffic.total_write_elems:>7}"
    )
    return traffic.total_elems


def main() -> None:
    q, k, v = (normal(BATCH, N, D) for _ in range(3))
    untiled, ruled = (1, 1), seed_rule(SRAM_SIZE, D)

    def ours(row: int, what: str, variant: str, tiles: tuple[int, int], *qkv, scale=None) -> int:
        Q, K, V = qkv or (q, k, v)
        run = attention(Q, K, V, variant=variant, block_q=tiles[0], block_k=tiles[1], scale=scale)
        return line(row, what, run, exact.attention(Q, K, V, scale=scale)[0])

    print("float32; error against float64; ==: counted equals closed form; traffic in elements")
    head = f"{'our name':<13} {'tiles':>7} {'error':>8} {'==':>5} {'reads':>7} {'writes':>7}"
    print(f"row  {'what':<36} {head}")
    x = q[0].astype(np.float64)
    probabilities = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    for row, algorithm in ((1, "safe"), (2, "online")):
        line(row, f"{algorithm} softmax", row_softmax(q[0], algorithm=algorithm), probabilities)
    ours(3, "statistics first, then the output", "two_pass", untiled)
    ours(4, "one query, output kept normalised", "q_outer_each", untiled, q[0, :1], k[0], v[0])
    ours(5, "flashattn_naiveQKV", "q_outer_each", untiled)
    ours(6, "flashattn_naiveKVQ, corrected", "kv_outer", untiled)
    ours(7, "flashattnV1_block", "q_outer", ruled)
    ours(8, "flashattnV2_blockKVQ", "kv_outer_end", ruled)
    ours(9, "tiles for 1024 elements: tutorial", "q_outer", ruled)
    ours(9, "  the paper's rule", "q_outer", paper_rule(SRAM_SIZE, D))
    found = best("q_outer", SRAM_SIZE * 4, n=N, d=D, granule=1)
    ours(9, "  best that fits", "q_outer", (found.block_q, found.block_k))
    ours(10, "softmax(QK^T)V, batched", "standard_safe", ruled)

    Q, K, V = normal(1, 12, 10), normal(1, 12, 10), normal(1, 12, 10)
    chunks = (-(-12 // 4), -(-12 // 3))  # rows of a tile, from 4 and 3 chunks
    ours(10, "second tutorial's standard attention", "standard_row", (12, 12), Q, K, V, scale=1.0)
    ours(11, "second tutorial, 4 x 3 chunks", "q_outer", chunks, Q, K, V, scale=1.0)
    ours(11, "  with values of width 6", "q_outer", chunks, Q, K, V[..., :6], scale=1.0)

    unit_q = ours(12, "unit: one query, all keys", "q_outer_each", untiled, q[0, :1], k[0], v[0])
    unit_kv = ours(12, "unit: one key, all queries", "kv_outer", untiled, q[0], k[0, :1], v[0, :1])
    start = N * (D + 2)  # m, l and O as kv_outer first writes them: once, not once a unit
    print("\nRow 12: elements that one unit moves")
    print(f"  q_outer_each: counted {unit_q}; the tutorial's 2Nd + 2d = {2 * N * D + 2 * D}")
    print(f"  kv_outer: counted {unit_kv - start}, and {start} once to start with;", end=" ")
    print(f"the tutorial's 2d + Nd + 2N = {2 * D + N * D + 2 * N}")


if __name__ == "__main__":
    main()
