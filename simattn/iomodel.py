"""Closed forms: what every variant counts, from its shapes alone.

A second, independent derivation of the ledger. It shares no code with the loop nests: each variant
is a bill whose terms name the tensor or the step they pay for, so agreement with a run is evidence
for both. Masks enter through the four sums of ``tilesums.py``.

The letters are the papers': n query rows, s key rows, d and e the widths of K and V, Br and Bc the
rows of a tile, w the storage width in bytes, a the accumulator's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from simattn.checks import flag, whole, window
from simattn.counts import Counts, Flops, SRAMTraffic, Traffic
from simattn.dtypes import DTYPES
from simattn.tilesums import Grid, TileSums, visited_sizes


@dataclass(frozen=True, slots=True)
class Shape:
    """One program's problem: everything a closed form may depend on."""

    grid: Grid
    d: int
    e: int
    w: int
    a: int
    lse: bool
    splits: int

    @property
    def n(self) -> int:
        return self.grid.n

    @property
    def s(self) -> int:
        return self.grid.s

    @property
    def block_k(self) -> int:
        return self.grid.block_k

    @property
    def tallest(self) -> int:
        """Rows of the largest query tile."""
        return min(self.grid.block_q, self.grid.n)


@dataclass(slots=True)
class Bill:
    """Adds up the terms of a closed form."""

    w: int
    a: int
    reads: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)
    read_bytes: Counter[str] = field(default_factory=Counter)
    write_bytes: Counter[str] = field(default_factory=Counter)
    sram_reads: int = 0
    sram_writes: int = 0
    sram_read_bytes: int = 0
    sram_write_bytes: int = 0
    matmul: int = 0
    nonmatmul: int = 0
    exp: int = 0
    peak: int = 0

    def load(self, tensor: str, elems: int, *, wide: bool = False) -> None:
        width = self.a if wide else self.w
        self.reads[tensor] += elems
        self.read_bytes[tensor] += elems * width
        self.sram_writes += elems
        self.sram_write_bytes += elems * width

    def store(self, tensor: str, elems: int, *, wide: bool = False) -> None:
        """Tiles stored are always at accumulator width; the tensor they go to may not be."""
        self.writes[tensor] += elems
        self.write_bytes[tensor] += elems * (self.a if wide else self.w)
        self.sram_reads += elems
        self.sram_read_bytes += elems * self.a

    def step(
        self,
        reads: int,
        writes: int,
        *,
        narrow: int = 0,
        matmul: int = 0,
        flops: int = 0,
        exp: int = 0,
    ) -> None:
        """A tile operation. ``reads`` at accumulator width, ``narrow`` reads at storage width."""
        self.sram_reads += reads + narrow
        self.sram_read_bytes += reads * self.a + narrow * self.w
        self.sram_writes += writes
        self.sram_write_bytes += writes * self.a
        self.matmul += matmul
        self.nonmatmul += flops
        self.exp += exp

    def live(self, narrow: int, wide: int) -> None:
        """These many elements are live at once."""
        self.peak = max(self.peak, narrow * self.w + wide * self.a)

    def overwrites(self, narrow: int) -> int:
        """Wide elements that overwriting a loaded tile takes: its own where widths are equal."""
        return narrow if self.w < self.a else 0

    def counts(self, programs: int) -> Counts:
        def times(c: Counter[str]) -> dict[str, int]:
            return {name: programs * elems for name, elems in c.items() if programs * elems}

        return Counts(
            Traffic(
                times(self.reads),
                times(self.writes),
                times(self.read_bytes),
                times(self.write_bytes),
            ),
            SRAMTraffic(
                programs * self.sram_reads,
                programs * self.sram_writes,
                programs * self.sram_read_bytes,
                programs * self.sram_write_bytes,
            ),
            Flops(programs * self.matmul, programs * self.nonmatmul, programs * self.exp),
            self.peak if programs else 0,
        )


# Steps that several variants share; `sums` runs over whichever tiles take the step.


def _score(bill: Bill, x: Shape, sums: TileSums) -> None:
    d, A = x.d, sums.pairs
    bill.step(0, A, narrow=sums.rows * d + sums.keys * d, matmul=2 * A * d)  # S = Q K^T
    bill.step(A, A, flops=A)  # S * scale


def _raise_max(bill: Bill, sums: TileSums, score_width: str = "wide") -> None:
    """m_new, the factor c it makes, and l under it."""
    A, B = sums.pairs, sums.rows
    wide, narrow = (A, 0) if score_width == "wide" else (0, A)
    bill.step(wide + B, B, narrow=narrow, flops=A + B)  # m_new = max(m, rowmax S)
    bill.step(2 * B, B, flops=B)  # m - m_new
    bill.step(B, B, exp=B)  # c = exp
    bill.step(2 * B, B, flops=B)  # l * c


def _sum_weights(bill: Bill, sums: TileSums, score_width: str = "wide") -> None:
    """P under m, and its sum into l."""
    A, B = sums.pairs, sums.rows
    wide, narrow = (A, 0) if score_width == "wide" else (0, A)
    bill.step(wide + B, A, narrow=narrow, flops=A)  # S - m
    bill.step(A, A, exp=A)  # P = exp
    bill.step(A + B, B, flops=A + B)  # l + rowsum P


def _accumulate(bill: Bill, x: Shape, sums: TileSums, weights: str = "wide") -> None:
    e, A, B = x.e, sums.pairs, sums.rows
    wide, narrow = (A, 0) if weights == "wide" else (0, A)
    bill.step(B * e + wide, B * e, narrow=sums.keys * e + narrow, matmul=2 * A * e)  # O += P V


def _divide(bill: Bill, elems: int, rows: int) -> None:
    bill.step(elems + rows, elems, flops=elems)


def _store_lse(bill: Bill, n: int) -> None:
    bill.step(n, n, flops=n)  # log l
    bill.step(2 * n, n, flops=n)  # + m
    bill.store("L", n, wide=True)


# The variants


def q_outer(bill: Bill, x: Shape, *, each: bool = False, stores_partials: bool = False) -> None:
    n, d, e, sums = x.n, x.d, x.e, TileSums.of(x.grid)
    parts = x.splits if stores_partials else 1
    bill.load("Q", parts * n * d)
    bill.step(0, parts * n * (e + 2))  # m = -inf, l = 0, O = 0
    bill.load("K", sums.keys * d)
    bill.load("V", sums.keys * e)
    _score(bill, x, sums)
    _raise_max(bill, sums)
    bill.step(sums.rows * (e + 1), sums.rows * e, flops=sums.rows * e)  # O * c, or O * (l c)
    _sum_weights(bill, sums)
    _accumulate(bill, x, sums)
    if each:
        _divide(bill, sums.rows * e, sums.rows)
    else:
        _divide(bill, parts * n * e, parts * n)
    Br = x.tallest
    bill.live(Br * d, Br * (e + 2))  # Q; m, l, O
    for Br, Bc in visited_sizes(x.grid):
        bill.live(Br * d + Bc * (d + e), Br * Bc + Br * e + 3 * Br)  # Q, K, V; S, O, m, l, m_new
    if not stores_partials:
        bill.store("O", n * e)
        if x.lse:
            _store_lse(bill, n)


def q_outer_each(bill: Bill, x: Shape) -> None:
    q_outer(bill, x, each=True)


def split_kv(bill: Bill, x: Shape) -> None:
    n, e, p = x.n, x.e, x.splits
    q_outer(bill, x, stores_partials=True)
    bill.step(p * n, p * n, flops=p * n)  # log l
    bill.step(2 * p * n, p * n, flops=p * n)  # L = m + log l
    bill.store("O_part", p * n * e, wide=True)
    bill.store("L_part", p * n, wide=True)

    bill.step(0, n * (e + 2))  # m = -inf, l = 0, O = 0
    bill.load("O_part", p * n * e, wide=True)
    bill.load("L_part", p * n, wide=True)
    bill.step(0, p * n)  # l = 1 of a part
    bill.step(2 * p * n, p * n, flops=p * n)  # m_new
    for _side in ("the merged state", "the part"):
        bill.step(2 * p * n, p * n, flops=p * n)  # m - m_new
        bill.step(p * n, p * n, exp=p * n)  # c
        bill.step(2 * p * n, p * n, flops=p * n)  # l * c
        bill.step(p * n * (e + 1), p * n * e, flops=p * n * e)  # O * c
    bill.step(2 * p * n, p * n, flops=p * n)  # l + l
    bill.step(2 * p * n * e, p * n * e, flops=p * n * e)  # O + O
    _divide(bill, n * e, n)
    bill.store("O", n * e)
    if x.lse:
        _store_lse(bill, n)
    bill.live(0, x.tallest * (2 * e + 5))  # both O, m, l, and m_new


def two_pass(bill: Bill, x: Shape) -> None:
    n, d, e, sums = x.n, x.d, x.e, TileSums.of(x.grid)
    bill.load("Q", n * d)
    bill.step(0, n * 2)  # m = -inf, l = 0
    bill.load("K", sums.keys * d)
    _score(bill, x, sums)
    _raise_max(bill, sums)
    _sum_weights(bill, sums)

    bill.step(0, n * e)  # O = 0
    bill.load("K", sums.keys * d)
    bill.load("V", sums.keys * e)
    _score(bill, x, sums)
    bill.step(sums.pairs + sums.rows, sums.pairs, flops=sums.pairs)  # S - m
    bill.step(sums.pairs, sums.pairs, exp=sums.pairs)  # exp
    _divide(bill, sums.pairs, sums.rows)  # P
    _accumulate(bill, x, sums)
    bill.store("O", n * e)
    if x.lse:
        _store_lse(bill, n)

    Br = x.tallest
    bill.live(Br * d, Br * (e + 2))  # Q; m, l, O
    for Br, Bc in visited_sizes(x.grid):
        bill.live(Br * d + Bc * d, Br * Bc + 3 * Br)  # Q, K; S, m, l, m_new
        bill.live(Br * d + Bc * (d + e), Br * Bc + Br * (e + 2))  # Q, K, V; P, O, m, l


def kv_outer(bill: Bill, x: Shape, *, divided: bool = True) -> None:
    n, d, e, sums = x.n, x.d, x.e, TileSums.of(x.grid)
    wide = not divided  # how O travels
    bill.step(0, n * (e + 2))  # m = -inf, l = 0, O = 0
    bill.store("m", n, wide=True)
    bill.store("l", n, wide=True)
    bill.store("O", n * e, wide=wide)

    bill.load("K", sums.keys_once * d)
    bill.load("V", sums.keys_once * e)
    bill.load("Q", sums.rows * d)
    bill.load("m", sums.rows, wide=True)
    bill.load("l", sums.rows, wide=True)
    bill.load("O", sums.rows * e, wide=wide)
    _score(bill, x, sums)
    _raise_max(bill, sums)
    moved = sums.rows * e
    if wide:
        bill.step(moved + sums.rows, moved, flops=moved)  # O * c
    else:
        bill.step(sums.rows, moved, narrow=moved, flops=moved)  # O * (l c)
    _sum_weights(bill, sums)
    _accumulate(bill, x, sums)
    if divided:
        _divide(bill, moved, sums.rows)
    bill.store("m", sums.rows, wide=True)
    bill.store("l", sums.rows, wide=True)
    bill.store("O", moved, wide=wide)

    Br = x.tallest
    bill.live(0, Br * (e + 2))  # the initial m, l, O
    for Br, Bc in visited_sizes(x.grid):
        narrow_O, wide_O = (0, Br * e) if wide else (Br * e, bill.overwrites(Br * e))
        bill.live(Br * d + Bc * (d + e) + narrow_O, Br * Bc + 3 * Br + wide_O)
    if divided and x.lse:
        bill.load("m", n, wide=True)
        bill.load("l", n, wide=True)
        _store_lse(bill, n)


def kv_outer_end(bill: Bill, x: Shape) -> None:
    n, e = x.n, x.e
    kv_outer(bill, x, divided=False)
    bill.load("O", n * e, wide=True)
    bill.load("l", n, wide=True)
    _divide(bill, n * e, n)
    bill.store("O", n * e)
    if x.lse:
        bill.load("m", n, wide=True)
        _store_lse(bill, n)


def standard_safe(bill: Bill, x: Shape) -> None:
    _standard(bill, x, safe)


def standard_online(bill: Bill, x: Shape) -> None:
    _standard(bill, x, online)


def standard_row(bill: Bill, x: Shape) -> None:
    _standard(bill, x, row)


def _standard(bill: Bill, x: Shape, softmax: Callable[..., None]) -> None:
    """S, P and O pass through HBM whole, masked or not."""
    n, s, d, e = x.n, x.s, x.d, x.e
    Tr, Tc = -(-n // x.grid.block_q), -(-s // x.block_k)
    sums = TileSums(keys=Tr * s, rows=Tc * n, pairs=n * s, keys_once=s)
    bill.load("Q", n * d)
    bill.load("K", sums.keys * d)
    _score(bill, x, sums)
    bill.store("S", n * s)

    softmax(bill, x, "S", "P")

    bill.step(0, n * e)  # O = 0
    bill.load("P", n * s)
    bill.load("V", sums.keys * e)
    _accumulate(bill, x, sums, weights="narrow")
    bill.store("O", n * e)

    Br, Bc = x.tallest, min(x.block_k, s)
    if n:
        bill.live(Br * d + Bc * d, Br * Bc)  # Q, K; S
        bill.live(Br * Bc + Bc * e, Br * e)  # P, V; O


# Softmaxes of n x s in HBM


def naive(bill: Bill, x: Shape, X: str, Y: str) -> None:
    n, s, A, B = x.n, x.s, x.n * x.s, -(-x.s // x.block_k) * x.n
    bill.step(0, n)  # l = 0
    bill.load(X, A)
    bill.step(0, A, narrow=A, exp=A)
    bill.step(A + B, B, flops=A + B)  # l + rowsum
    bill.load(X, A)
    bill.step(0, A, narrow=A, exp=A)
    _divide(bill, A, B)
    bill.store(Y, A)
    if x.lse:
        bill.step(n, n, flops=n)  # log l
        bill.store("L", n, wide=True)
    Br, Bc = x.tallest, min(x.block_k, s)
    bill.live(Br * Bc, bill.overwrites(Br * Bc) + Br)


def safe(bill: Bill, x: Shape, X: str, Y: str) -> None:
    A, B = x.n * x.s, -(-x.s // x.block_k) * x.n
    bill.step(0, 2 * x.n)  # m = -inf, l = 0
    bill.load(X, A)
    bill.step(B, B, narrow=A, flops=A + B)  # max(m, rowmax)
    bill.load(X, A)
    _sum_weights(bill, TileSums(0, B, A, 0), score_width="narrow")
    _divide_pass(bill, x, X, Y)


def online(bill: Bill, x: Shape, X: str, Y: str) -> None:
    sums = TileSums(keys=0, rows=-(-x.s // x.block_k) * x.n, pairs=x.n * x.s, keys_once=0)
    bill.step(0, 2 * x.n)  # m = -inf, l = 0
    bill.load(X, x.n * x.s)
    _raise_max(bill, sums, score_width="narrow")
    _sum_weights(bill, sums, score_width="narrow")
    _divide_pass(bill, x, X, Y)


def _divide_pass(bill: Bill, x: Shape, X: str, Y: str) -> None:
    A, B = x.n * x.s, -(-x.s // x.block_k) * x.n
    bill.load(X, A)
    bill.step(B, A, narrow=A, flops=A)  # X - m
    bill.step(A, A, exp=A)
    _divide(bill, A, B)
    bill.store(Y, A)
    if x.lse:
        _store_lse(bill, x.n)
    Br, Bc = x.tallest, min(x.block_k, x.s)
    bill.live(0, 2 * Br)
    if Bc:
        bill.live(Br * Bc, 3 * Br)  # X; m, l, m_new
        bill.live(Br * Bc, bill.overwrites(Br * Bc) + 2 * Br)  # X; X - m, m, l


def row(bill: Bill, x: Shape, X: str, Y: str) -> None:
    n, A = x.n, x.n * x.s
    bill.step(0, 2 * n)  # m = -inf, l = 0
    bill.load(X, A)
    bill.step(n, n, narrow=A, flops=A + n)  # m = rowmax
    _sum_weights(bill, TileSums(0, n, A, 0), score_width="narrow")
    _divide(bill, A, n)
    bill.store(Y, A)
    if x.lse:
        _store_lse(bill, n)
    Br = x.tallest
    bill.live(Br * x.s, bill.overwrites(Br * x.s) + 3 * Br)  # X; X - m, m0, m, l


FORMS: dict[str, Callable[[Bill, Shape], None]] = {
    f.__name__: f
    for f in (
        standard_safe,
        standard_online,
        standard_row,
        two_pass,
        q_outer,
        q_outer_each,
        kv_outer,
        kv_outer_end,
        split_kv,
    )
}
SOFTMAX_FORMS = {f.__name__: f for f in (naive, safe, online, row)}


def predict(
    variant: str,
    *,
    n: int,
    d: int,
    n_k: int | None = None,
    dv: int | None = None,
    heads: int = 1,
    kv_heads: int | None = None,
    batch: int = 1,
    block_q: int,
    block_k: int,
    splits: int | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dtype: str = "float32",
    return_lse: bool = False,
) -> Counts:
    """What `simattn.attention` would count, without running it.

    Parameters
    ----------
    variant : str
        One of ``standard_safe standard_online standard_row two_pass q_outer q_outer_each kv_outer
        kv_outer_end split_kv``.
    n, d, n_k, dv : int
        Query rows and width; key rows (default n) and value width (default d).
    heads, kv_heads, batch : int
        Query heads and batch multiply every total; K/V heads shared by several query heads
        (default: heads) do not lower it, for each query head loads its own.
    block_q, block_k : int
        Rows of a tile; clamped to n and n_k. 1 and 1 is untiled.
    splits : int, optional
        Parts of ``split_kv`` (default 4); at most the number of key tiles.
    is_causal, window_size, dtype, return_lse
        As in `simattn.attention`.

    Raises
    ------
    ValueError
        Naming the argument, its value and the rule.

    Examples
    --------
    >>> predict("q_outer", n=1024, d=64, block_q=64, block_k=64).traffic.total_elems
    2228224
    >>> 2 * 1024 * 64 + 2 * 1024 * 64 * 16  # 2Nd + 2Nd Tr
    2228224
    """
    if not isinstance(variant, str) or variant not in FORMS:
        raise ValueError(f"variant {variant!r}: must be one of {', '.join(FORMS)}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
    n, d, heads = whole("n", n, 0), whole("d", d), whole("heads", heads, 0)
    n_k, dv = whole("n_k", n if n_k is None else n_k, 0), whole("dv", d if dv is None else dv)
    batch = whole("batch", batch, 0)
    block_q, block_k = whole("block_q", block_q), whole("block_k", block_k)
    splits = whole("splits", 4 if splits is None else splits)
    kv_heads = whole("kv_heads", heads if kv_heads is None else kv_heads, 0)
    if (heads % kv_heads) if kv_heads else heads:
        raise ValueError(f"kv_heads {kv_heads}: must divide heads {heads}")
    is_causal, return_lse = flag("is_causal", is_causal), flag("return_lse", return_lse)
    left, right = window(window_size)
    block_k = min(block_k, max(n_k, 1))
    grid = Grid(n, n_k, min(block_q, max(n, 1)), block_k, left, 0 if is_causal else right)
    parts = max(1, min(splits, -(-n_k // block_k)))
    w, a = DTYPES[dtype].width_bytes, DTYPES[dtype].accumulator.width_bytes
    bill = Bill(w, a)
    shape = Shape(grid, d, dv, w, a, return_lse, parts)
    FORMS[variant](bill, shape)
    return bill.counts(batch * heads)


def predict_softmax(
    algorithm: str, *, rows: int, columns: int, block_q: int = 1, block_k: int = 1,
    dtype: str = "float32",
) -> Counts:  # fmt: skip
    """What `simattn.row_softmax` would count. Tensors are S, the scores, and P, their softmax.

    >>> predict_softmax("online", rows=10, columns=100).traffic.total_elems  # 3 an element
    3000
    """
    if algorithm not in SOFTMAX_FORMS:
        raise ValueError(f"algorithm {algorithm!r}: must be one of {', '.join(SOFTMAX_FORMS)}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
    rows, columns = whole("rows", rows, 0), whole("columns", columns, 0)
    block_q, block_k = whole("block_q", block_q), whole("block_k", block_k)
    w, a = DTYPES[dtype].width_bytes, DTYPES[dtype].accumulator.width_bytes
    grid = Grid(rows, columns, min(block_q, max(rows, 1)), min(block_k, max(columns, 1)), -1, -1)
    bill, shape = Bill(w, a), Shape(grid, 1, 1, w, a, lse=False, splits=1)
    SOFTMAX_FORMS[algorithm](bill, shape, "S", "P")
    return bill.counts(1)
