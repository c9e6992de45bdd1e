"""Tile shapes of the tensor-core kernel, and where its buffers lie. Plain integers, no CUDA.

A block of ``warps`` warps keeps Br = 16 * row_tiles * warps queries; tiles of Bc keys stream past.
Shared memory holds Q, then two stages of K and V. Rows are padded to whole matrices there, and
there only. Read next: ``mma_tiles.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .layout import round_up

CHUNK_BYTES = 16  # what a copy, and a row of an 8 x 8 matrix, moves
WIDEST = 256


@dataclass(frozen=True, slots=True)
class Swizzle:
    """Where 16-byte chunks lie: chunk j of row r at place j ^ x, x = r >> shift & mask.

    ldmatrix reads 8 rows of a chunk each at once, from all 32 banks if their places are different
    modulo 8 chunks. Rows of C = 2**a * odd chunks begin at 8 / 2**a different places (a <= 3), and
    then repeat: x numbers the repetitions, and permutes chunks within aligned groups of 2**a.
    """

    chunks: int

    @property
    def mask(self) -> int:
        return min(8, self.chunks & -self.chunks) - 1

    @property
    def shift(self) -> int:
        return 3 - self.mask.bit_length()

    def place(self, row: int, chunk: int) -> int:
        """In chunks from the buffer's start.

        >>> sorted(Swizzle(10).place(r, 0) % 8 for r in range(8))
        [0, 1, 2, 3, 4, 5, 6, 7]
        """
        return row * self.chunks + (chunk ^ row >> self.shift & self.mask)


@dataclass(frozen=True, slots=True)
class MmaLayout:
    """One compiled kernel's shape."""

    d: int  # width of Q and K in shared memory
    e: int  # width of V
    warps: int
    row_tiles: int  # MT, of 16 queries, a warp
    block_k: int  # Bc
    min_blocks: int = 1  # blocks an SM should hold at a time: bounds the registers
    itemsize: int = 2  # bytes of an element
    chain: int = 2  # float32: steps of 8, at most, that are summed in tensor cores

    def __post_init__(self) -> None:
        for name in ("warps", "row_tiles", "block_k"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name}: {size} must be a power of two, which threads share out")
        chunks = self.Q_swizzle.chunks  # a row's, each copied by one thread
        if chunks > self.threads:
            raise ValueError(
                f"warps: {self.warps} have too few threads for the {chunks} copies of a row"
            )

    @property
    def block_q(self) -> int:
        return self.warps * self.row_tiles * 16

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def chunk(self) -> int:
        """Elements in 16 bytes."""
        return CHUNK_BYTES // self.itemsize

    @property
    def Q_swizzle(self) -> Swizzle:
        """Q's rows have room for the output's, which takes their place."""
        return Swizzle(max(self.d, self.e) // self.chunk)

    @property
    def K_swizzle(self) -> Swizzle:
        return Swizzle(self.d // self.chunk)

    @property
    def V_swizzle(self) -> Swizzle:
        return Swizzle(self.e // self.chunk)

    @property
    def Q_bytes(self) -> int:
        return CHUNK_BYTES * self.Q_swizzle.chunks * self.block_q

    @property
    def K_bytes(self) -> int:
        return CHUNK_BYTES * self.K_swizzle.chunks * self.block_k

    @property
    def V_bytes(self) -> int:
        return CHUNK_BYTES * self.V_swizzle.chunks * self.block_k

    @property
    def shared_bytes(self) -> int:
        """Q, and two stages of K and V."""
        return self.Q_bytes + 2 * (self.K_bytes + self.V_bytes)

    @property
    def turn(self) -> int:
        """float32: steps of 8 in the code of Q K^T, which is a loop. Whole chains."""
        return math.gcd(self.d // 8, max(4, self.chain))

    @property
    def mma_count(self) -> int:
        """Tensor-core instructions in the code: those of one tile, a warp; S is there once more, to
        compute it again. float32 takes three products for one, of half the depth, and one for the
        last bit of V.
        """
        if self.itemsize == 2:
            QK = 2 * (self.block_k // 8) * (self.d // 16)
            PV = self.e // 8 * (self.block_k // 16)
        else:
            QK = 3 * (self.block_k // 8) * self.turn
            PV = (3 + 1) * (self.e // 8) * (self.block_k // 8)
        return self.row_tiles * (QK + PV)


def takes(d: int, e: int) -> bool:
    """Whether the tensor-core kernels take these widths: steps of 8, up to 256."""
    return all(width % 8 == 0 and 8 <= width <= WIDEST for width in (d, e))


def layout_for(
    d: int, e: int, *, itemsize: int = 2, capability: tuple[int, int] = (9, 0)
) -> MmaLayout:
    """The shape that is fastest for these widths, as far as `LAYOUTS` knows.

    >>> layout = layout_for(40, 64)
    >>> layout.d, layout.e, layout.block_q, layout.block_k
    (48, 64, 128, 64)
    """
    whole_d, whole_e = (16, 16) if itemsize == 2 else (8, 32)
    d, e = round_up(d, whole_d), round_up(e, whole_e)
    for widest_d, widest_e, shape in LAYOUTS[itemsize, capability >= (9, 0)]:
        if d <= widest_d and e <= widest_e:
            return MmaLayout(d, e, *shape, itemsize=itemsize)
    raise ValueError(f"d, e: widths {d} and {e} must be at most {WIDEST}")


# Bytes of an element, and whether the device is an sm_90 up, with 227 KiB of shared memory a block;
# the others have at least 99. Then the largest d and e, and warps, row tiles a warp, Bc, blocks an
# SM. The first row that fits is taken. Measured on an H200, with ``python -m kernels tune`` where d
# and e are alike. A lane holds MT * (Bc + e) / 2 sums in its 255 registers: where they are not
# enough for 64 keys, 32 are taken.
LAYOUTS = {
    (2, True): (
        (64, 64, (4, 2, 64, 2)),
        (128, 64, (4, 2, 64, 1)),
        (112, 96, (4, 2, 64, 1)),
        (128, 112, (4, 2, 32, 1)),
        (112, 128, (4, 2, 32, 1)),
        (128, 128, (4, 2, 64, 1)),
        (192, 192, (8, 1, 64, 1)),
        (256, 256, (4, 1, 32, 1)),
    ),
    (2, False): (
        (64, 64, (4, 2, 64, 2)),
        (128, 128, (4, 2, 32, 1)),
        (192, 192, (4, 1, 32, 1)),
        (256, 256, (4, 1, 32, 1)),
    ),
    (4, True): (
        (64, 64, (4, 2, 32, 2)),
        (128, 128, (4, 1, 32, 2)),
        (256, 256, (4, 1, 16, 1)),
    ),
    (4, False): (
        (64, 64, (4, 2, 32, 1)),
        (128, 128, (4, 1, 32, 1)),
        (256, 256, (2, 1, 16, 1)),
    ),
}
