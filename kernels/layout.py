"""Who computes what, and which buffer lies where in shared memory. Plain integers, no CUDA.

A block of ``ty * tx`` threads works on one tile pair at a time. Thread (ty, tx) owns the rows ty,
ty + TY, ... and the columns tx, tx + TX, ... of whatever is computed or copied: MR x MC scores and
MR x ME output sums in its registers. Neighbouring threads touch neighbouring words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_WIDTH = 256
IN_FLIGHT = 16  # elements a thread asks global memory for before it waits
TILES = ((64, 64), (64, 32), (32, 32), (32, 16), (16, 16))  # block_q, block_k: the first that fits
SMALLEST = (8, 16)  # fits 48 KiB at the widest, with half a warp a row
ROWS_A_THREAD = 8
MAX_THREADS = 1024  # a block's
WIDE = 128  # from here on a whole warp shares a row of the output, else half a warp


def round_up(x: int, step: int) -> int:
    """The next multiple of ``step``: ``round_up(37, 16) == 48``."""
    return -(-x // step) * step


@dataclass(frozen=True, slots=True)
class Layout:
    """One compiled kernel's shape: tiles, threads, and the widths that its buffers hold."""

    block_q: int  # Br, rows of a Q tile
    block_k: int  # Bc, rows of a K and V tile
    d: int  # width of Q and K in shared memory: a multiple of 8 and of tx
    e: int  # width of V in shared memory: a multiple of tx
    ty: int  # threads down the rows
    tx: int  # threads along the keys and the value columns
    min_blocks: int = 1  # blocks an SM should hold at a time: bounds the registers

    @property
    def threads(self) -> int:
        return self.ty * self.tx

    @property
    def MR(self) -> int:
        """Rows a thread computes."""
        return -(-self.block_q // self.ty)

    @property
    def MC(self) -> int:
        """Keys a thread computes; a tile's padded key count is a multiple of 4."""
        per_thread = -(-self.block_k // self.tx)
        while per_thread * self.tx % 4:
            per_thread += 1
        return per_thread

    @property
    def ME(self) -> int:
        """Value columns a thread computes."""
        return -(-self.e // self.tx)

    @property
    def registers(self) -> int:
        """About how many a thread needs before it spills: scores, sums, operands, and the rest."""
        return max(152, self.MR * (self.MC + self.ME + 4) + 56)

    @property
    def in_flight(self) -> int:
        """Elements that a thread holds on their way from global to shared memory, at most."""
        d_cols, kv_rows = self.d // self.tx, self.kv_rows // self.ty
        loads = ((self.MR, d_cols), (kv_rows, d_cols), (kv_rows, self.ME))
        return max(rows_at_once(rows, cols) * cols for rows, cols in loads)

    @property
    def rows(self) -> int:
        """Rows of Q, P and the statistics in shared memory, at least ``block_q``."""
        return self.ty * self.MR

    @property
    def keys(self) -> int:
        """Keys of S and P, at least ``block_k``."""
        return self.tx * self.MC

    @property
    def kv_rows(self) -> int:
        """Rows of K and V in shared memory: each thread loads as many."""
        return round_up(self.keys, self.ty)


@dataclass(frozen=True, slots=True)
class Buffers:
    """Where each buffer starts in a block's shared memory, in float32 elements, and row pitches.

    Pitches of rows that are read 16 bytes at a time are odd multiples of 4: eight neighbouring rows
    then fall into eight different groups of four banks.
    """

    Q: int
    K: int
    V: int
    P: int
    posts: int  # one value a thread and row, for maxima and sums over a row
    m: int
    l: int
    elems: int
    d_pitch: int
    e_pitch: int
    p_pitch: int
    post_pitch: int

    @property
    def bytes(self) -> int:
        return 4 * self.elems


def buffers(variant: str, layout: Layout) -> Buffers:
    """Place the buffers. ``q_outer`` lets K and V take turns in one; ``kv_outer`` keeps both."""
    d_pitch, e_pitch = layout.d + 4, layout.e
    p_pitch, post_pitch = layout.keys + 4, layout.tx + 4
    K_elems, V_elems = layout.kv_rows * d_pitch, layout.kv_rows * e_pitch
    stays = variant == "kv_outer"

    Q = 0
    K = Q + layout.rows * d_pitch
    V = K + K_elems if stays else K
    P = round_up(V + V_elems if stays else K + max(K_elems, V_elems), 4)
    posts = P + layout.rows * p_pitch
    m = posts + layout.rows * post_pitch
    l = m + layout.rows if stays else m
    elems = l + layout.rows if stays else m
    return Buffers(Q, K, V, P, posts, m, l, elems, d_pitch, e_pitch, p_pitch, post_pitch)


def rows_at_once(rows: int, cols: int) -> int:
    """How many of its rows a thread loads at once: about ``IN_FLIGHT`` elements, and no remainder.

    >>> rows_at_once(8, 4), rows_at_once(8, 8), rows_at_once(6, 4)
    (4, 2, 3)
    """
    most = max(1, IN_FLIGHT // cols)
    return max(at_once for at_once in range(1, most + 1) if rows % at_once == 0)


def choose(
    variant: str,
    d: int,
    e: int,
    *,
    shared_per_block: int,
    shared_per_sm: int,
    registers_per_sm: int = 65536,
    block_q: int | None = None,
    block_k: int | None = None,
) -> Layout:
    """A layout for these widths that fits a block's shared memory (bytes).

    >>> layout = choose("q_outer", 128, 128, shared_per_block=232448, shared_per_sm=233472)
    >>> layout.block_q, layout.block_k, layout.threads, layout.min_blocks
    (64, 64, 128, 2)
    """
    tried = [(*tile, 32 if e > WIDE else 16) for tile in TILES]
    tried += [(*tile, 16) for tile in (*TILES, SMALLEST)]
    for rows, keys, tx in dict.fromkeys((block_q or r, block_k or k, tx) for r, k, tx in tried):
        ty = 8
        while rows > ty * ROWS_A_THREAD and ty * tx < MAX_THREADS:
            ty *= 2
        layout = Layout(rows, keys, round_up(d, tx), round_up(e, tx), ty, tx)
        needed = buffers(variant, layout).bytes
        if needed <= shared_per_block:
            by_shared = shared_per_sm // (needed + 1024)  # the system keeps 1 KiB a block
            by_registers = registers_per_sm // (layout.threads * layout.registers)
            return replace(layout, min_blocks=max(1, min(by_shared, by_registers)))
    raise ValueError(
        f"block_q, block_k: tiles of {rows} x {keys} at widths {d} and {e} need {needed} bytes of "
        f"shared memory, the device has {shared_per_block} a block"
    )
