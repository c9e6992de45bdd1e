"""Tile shapes of the Hopper kernel, and where its buffers lie. Plain integers, no CUDA.

A block is a producer warpgroup, and ``groups`` consumer warpgroups of 64 queries each. In shared
memory a matrix is column blocks of 64 elements, 128 bytes a row, as tensor copies swizzle them;
columns and rows that a tensor does not have are zeros there. Read next: ``sm90_schedule.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .layout import round_up
from .mma_layout import WIDEST

ROW_BYTES, BLOCK_COLUMNS = 128, 64  # of a column block
GROUP_ROWS = 64  # queries of a warpgroup: wgmma's M
WARP_ROWS = 16
MOST_KEYS = 128  # a lane's mask has a bit for each of its 32 columns
SLOT_BYTES = 16
ALIGNED = 1024  # the swizzle's period
MAXIMA = ("fast", "exact")
# A thread's registers, by groups: the producer's, a consumer's. The launch gives all threads the
# same share of 65536, and setmaxnreg can only move them.
REGISTERS = {1: (56, 240), 2: (40, 232), 3: (32, 160)}


def can_sit_out(groups: int, stages: int) -> bool:
    """Whether warpgroups may sit out.

    A turn tells such a one what those before it have released. Those after it are a tile behind,
    and may still hold one stage of two.
    """
    return stages >= groups


@dataclass(frozen=True, slots=True)
class Sm90Layout:
    """One compiled kernel's shape."""

    d: int  # width of Q and K in products, a multiple of 16
    e: int  # width of V
    groups: int  # consumer warpgroups
    block_k: int  # Bc
    stages: int = 2  # of K, and of V
    q_stages: int = 2
    early: int = 8  # column tiles of P, of 8 keys, that do not wait for the product under way
    sits_out: bool = True  # a warpgroup whose rows are all past the last one computes nothing
    maxima: str = "fast"  # or "exact": found anew for every tile
    itemsize: int = 2

    def __post_init__(self) -> None:
        if self.groups not in REGISTERS:
            raise ValueError(f"groups: {self.groups} must be one of {tuple(REGISTERS)}")
        if not 16 <= self.block_k <= MOST_KEYS or self.block_k % 16:
            raise ValueError(
                f"block_k: {self.block_k} must be a multiple of 16 from 16 to {MOST_KEYS}"
            )
        if self.stages < 2 or (self.sits_out and not can_sit_out(self.groups, self.stages)):
            raise ValueError(
                f"stages: {self.stages} must be at least 2, and with sits_out at least groups, "
                f"{self.groups}"
            )
        if self.q_stages < 1:
            raise ValueError(f"q_stages: {self.q_stages} must be at least 1")
        if not 0 <= self.early <= self.block_k // 8:
            raise ValueError(
                f"early: {self.early} must be from 0 to the column tiles of block_k, "
                f"{self.block_k // 8}"
            )
        if self.maxima not in MAXIMA:
            raise ValueError(f"maxima: {self.maxima!r} must be one of {', '.join(MAXIMA)}")

    @property
    def block_q(self) -> int:
        return self.groups * GROUP_ROWS

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def min_blocks(self) -> int:
        return 1

    @property
    def producer_registers(self) -> int:
        return REGISTERS[self.groups][0]

    @property
    def consumer_registers(self) -> int:
        return REGISTERS[self.groups][1]

    @property
    def launch_registers(self) -> int:
        """A thread's, when the block starts."""
        return 65536 // self.threads // 8 * 8

    @property
    def d_blocks(self) -> int:
        """Column blocks of Q and of K."""
        return -(-self.d // BLOCK_COLUMNS)

    @property
    def e_blocks(self) -> int:
        """Column blocks of V and of O."""
        return -(-self.e // BLOCK_COLUMNS)

    @property
    def Q_bytes(self) -> int:
        return self.block_q * ROW_BYTES * self.d_blocks

    @property
    def K_bytes(self) -> int:
        return self.block_k * ROW_BYTES * self.d_blocks

    @property
    def V_bytes(self) -> int:
        return self.block_k * ROW_BYTES * self.e_blocks

    @property
    def O_blocks(self) -> int:
        """Column blocks of O that a warp sends at a time."""
        return self.e_blocks if self.e_blocks <= 2 else 1

    @property
    def O_bytes(self) -> int:
        return self.block_q * ROW_BYTES * self.O_blocks

    @property
    def K_start(self) -> int:
        return self.q_stages * self.Q_bytes

    @property
    def V_start(self) -> int:
        return self.K_start + self.stages * self.K_bytes

    @property
    def O_start(self) -> int:
        return self.V_start + self.stages * self.V_bytes

    @property
    def barriers_start(self) -> int:
        """Full and empty Q, full K, full V, empty K, empty V: 8 bytes a stage each."""
        return self.O_start + self.O_bytes

    @property
    def slots(self) -> int:
        """Items that are known to the block: one is stored while the next Q are used or loaded."""
        return self.q_stages + 1

    @property
    def slots_start(self) -> int:
        return round_up(self.barriers_start + 8 * (2 * self.q_stages + 4 * self.stages), SLOT_BYTES)

    @property
    def marks_start(self) -> int:
        """A word for each consumer warp."""
        return self.slots_start + SLOT_BYTES * self.slots

    @property
    def shared_bytes(self) -> int:
        """What a block asks for: dynamic shared memory is aligned to 16 bytes, and no more."""
        return self.marks_start + 4 * 4 * self.groups + ALIGNED

    @property
    def waves(self) -> int:
        """How often the query tiles of heads that are under way together fill the device."""
        return 2 if self.d <= BLOCK_COLUMNS else 1

    @property
    def products(self) -> int:
        """wgmma instructions of one tile."""
        return self.d // 16 + self.block_k // 16


def layout_for(
    d: int, e: int, *, n: int, s: int, is_causal: bool = False, maxima: str = "fast"
) -> Sm90Layout:
    """The shape that is fastest for these widths and rows, as far as `LAYOUTS` knows.

    >>> layout = layout_for(128, 128, n=4096, s=4096)
    >>> layout.block_q, layout.block_k, layout.shared_bytes <= 227 * 1024
    (128, 128, True)
    """
    d, e = round_up(d, 16), round_up(e, 16)
    for widest_d, widest_e, least, least_causal, options in LAYOUTS:
        long = min(n, s) >= (least_causal if is_causal else least)
        if d <= widest_d and e <= widest_e and long:
            extra = EXACT.get((widest_d, widest_e), {}) if maxima == "exact" else {}
            return Sm90Layout(d, e, **options | extra, maxima=maxima)
    raise ValueError(f"d, e: widths {d} and {e} must be at most {WIDEST}")


# The largest d and e, the least number of rows without a mask, and causal, and the shape; the first
# that fits is taken. Measured on an H200 with ``python -m kernels tune``. A consumer's thread holds
# block_k / 2 scores, block_k / 4 registers of P and e / 2 sums of O. Sitting out costs the short
# rows of d = 64 7 %: the two warpgroups come to take turns at a worse time.
LAYOUTS: tuple[tuple[int, int, int, int, dict[str, Any]], ...] = (
    (64, 64, 512, 2048, {"groups": 3, "block_k": 128, "stages": 3, "early": 8}),
    (64, 64, 0, 0, {"groups": 2, "block_k": 128, "stages": 4, "q_stages": 3, "early": 4,
                    "sits_out": False}),
    (128, 128, 0, 0, {"groups": 2, "block_k": 128, "early": 4}),
    (192, 128, 0, 0, {"groups": 2, "block_k": 96, "q_stages": 1, "early": 6}),
    (192, 192, 0, 0, {"groups": 2, "block_k": 80, "q_stages": 1, "early": 5}),
    (256, 256, 0, 0, {"groups": 2, "block_k": 64, "q_stages": 1, "early": 4}),
)  # fmt: skip
EXACT = {(256, 256): {"block_k": 48}}  # what new maxima in each tile have no registers for
