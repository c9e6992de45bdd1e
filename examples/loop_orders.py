"""Which loop order moves less? Count it, per execution unit and in total, untiled and tiled.

A unit is what the first tutorial gives to one block of the GPU: a query tile with all keys
(``q_outer``), or a key tile with all queries (``kv_outer``). It prices the units, untiled, at
2Nd + 2d and 2d + Nd + 2N elements. The second leaves out that O, m and l travel both ways.
Run: python examples/loop_orders.py. Read next: tile_sizes.py.
"""

from collections import Counter

import numpy as np

from simattn import attention

N, D = 64, 32  # queries and keys; width
X = np.random.default_rng(0).standard_normal((N, D), dtype=np.float32)


def count(variant: str, block: int, n: int = N, s: int = N) -> tuple[Counter, Counter]:
    """HBM reads and writes per tensor of n queries and s keys, in elements."""
    run = attention(X[:n], X[:s], X[:s], variant=variant, block_q=block, block_k=block)
    return Counter(run.traffic.reads), Counter(run.traffic.writes)


def unit(variant: str, block: int) -> tuple[Counter, Counter]:
    """What one more unit costs: a run of two, less a run of one (what is paid once drops out)."""
    rows = "n" if variant == "q_outer" else "s"
    two = count(variant, block, **{rows: 2 * block})
    one = count(variant, block, **{rows: block})
    return two[0] - one[0], two[1] - one[1]


def tutorial(variant: str, B: int) -> int:
    """One unit as the tutorial counts it, its one query or key read as a tile of B."""
    return 2 * B * D + (2 * N * D if variant == "q_outer" else N * D + 2 * N)


def closed_form(variant: str, B: int) -> tuple[int, int]:
    """One unit, and the whole run of T units."""
    T = -(-N // B)
    if variant == "q_outer":
        return 2 * B * D + 2 * N * D, 2 * N * D + 2 * N * D * T
    return 2 * B * D + 3 * N * D + 4 * N, 3 * N * D + 2 * N + T * (3 * N * D + 4 * N)


def main() -> None:
    print(f"{N} queries and keys of width {D}, one head. All figures: elements to or from HBM.\n")
    print("                       --------- one unit ---------   --------- all units --------")
    print("           order       tutorial  counted       form   tutorial  counted       form")
    for name, B in (("untiled", 1), ("16 x 16", 16)):
        table = []
        for variant in ("q_outer", "kv_outer"):
            one = sum(unit(variant, B)[0].values()) + sum(unit(variant, B)[1].values())
            whole = sum(sum(c.values()) for c in count(variant, B))
            guess, form = tutorial(variant, B), closed_form(variant, B)
            table.append((guess, one, form[0], guess * (N // B), whole, form[1]))
            cells = "{:>9} {:>8} {:>10}  {:>9} {:>8} {:>10}".format(*table[-1])
            print(f"{name:<10} {variant:<11}{cells}")
        less = [("q_outer", "kv_outer")[q > kv] for q, kv in zip(*table, strict=True)]
        cells = "{:>9} {:>8} {:>10}  {:>9} {:>8}\n".format(*less[:2], "", *less[3:5])
        print(f"{'less moved':<22}{cells}")

    print("One more unit of kv_outer, untiled: a key and its value meet all queries.")
    reads, writes = unit("kv_outer", 1)
    print("tensors   reads  writes  tutorial has")
    for tensors, guess in (("K V", "2d read"), ("Q", "Nd read"), ("m l", "2N read"), ("O", "-")):
        r, w = (sum(c[t] for t in tensors.split()) for c in (reads, writes))
        print(f"{tensors:<8} {r:>6} {w:>7}  {guess}")
    print("\nBy the tutorial's prices kv_outer moves less. Counted in full, q_outer does, untiled")
    print("and with tiles of equal rows. The forms, for T = N / B units of B rows:")
    print("  q_outer   one 2Bd + 2Nd         all 2Nd + 2Nd T")
    print("  kv_outer  one 2Bd + 3Nd + 4N    all 3Nd + 2N + T (3Nd + 4N), initial O, m, l included")


if __name__ == "__main__":
    main()
