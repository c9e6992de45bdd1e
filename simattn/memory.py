"""Two memories and a ledger: the machine on which every variant runs.

HBM holds whole tensors. SRAM is what one program (one CUDA block) owns: tiles, within a capacity.
Arithmetic happens between tiles and nowhere else; tiles come from ``SRAM.load`` and go back through
``SRAM.store``. This file is the only place where a number is counted, by these rules:

* ``load`` of a region is that many elements of HBM reads and of SRAM writes; ``store`` the reverse.
* A tile operation reads each operand once from SRAM and writes its result once.
* A matmul is 2 FLOPs a multiply-add, accumulation included. An elementwise step costs its output's
  elements, a reduction its input's. ``exp`` has a column of its own. Masking is a predicate on
  indices, not arithmetic, and costs nothing.
* A loaded tile has its tensor's storage width. What is computed has accumulator width, at least 4
  bytes. An operation that overwrites a narrower tile therefore leaves a new, wider one, and the
  narrow one is freed after it.

Read next: ``softmax.py`` for the recurrence, ``variants.py`` for the loop nests.
"""

from __future__ import annotations

import math
from collections import Counter
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from simattn.counts import Counts, Flops, SRAMTraffic, Traffic
from simattn.dtypes import Array, DType

Index = int | slice | EllipsisType | tuple[int | slice, ...]


class SRAMCapacityError(ValueError):
    """A tile did not fit. The message names the tile, its bytes, what is live, and the capacity."""


class Ledger:
    """The running counts of one run; one ledger may serve many programs."""

    __slots__ = ("exp", "matmul", "nonmatmul", "peak_bytes", "reads", "sram_read_bytes",
                 "sram_reads", "sram_write_bytes", "sram_writes", "writes")  # fmt: skip

    def __init__(self) -> None:
        self.reads: Counter[tuple[str, int]] = Counter()  # elements, by tensor and width in bytes
        self.writes: Counter[tuple[str, int]] = Counter()
        self.sram_reads = self.sram_writes = self.sram_read_bytes = self.sram_write_bytes = 0
        self.matmul = self.nonmatmul = self.exp = self.peak_bytes = 0

    def counts(self) -> Counts:
        return Counts(
            Traffic(
                _by_tensor(self.reads, bytes_each=False),
                _by_tensor(self.writes, bytes_each=False),
                _by_tensor(self.reads, bytes_each=True),
                _by_tensor(self.writes, bytes_each=True),
            ),
            SRAMTraffic(
                self.sram_reads, self.sram_writes, self.sram_read_bytes, self.sram_write_bytes
            ),
            Flops(self.matmul, self.nonmatmul, self.exp),
            self.peak_bytes,
        )


def _by_tensor(moved: Counter[tuple[str, int]], *, bytes_each: bool) -> dict[str, int]:
    total: Counter[str] = Counter()
    for (name, width), elems in moved.items():
        total[name] += elems * width if bytes_each else elems
    return dict(+total)


class Region:
    """A tensor in HBM, or part of one: something to load from or store to, and nothing else."""

    __slots__ = ("_data", "dtype", "name")
    __array_ufunc__ = None
    __iter__ = None

    def __init__(self, array: Array, dtype: DType, name: str) -> None:
        self._data, self.dtype, self.name = array, dtype, name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape

    def __getitem__(self, index: Index) -> Region:
        return Region(self._data[index], self.dtype, self.name)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{self.name} lies in HBM: load it into SRAM to compute with it")


class HBM:
    """Whole tensors by name: ``hbm.place("Q", array, dtype)`` makes ``hbm.Q[0:64]`` a region."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Region: ...

    def place(self, name: str, array: Array, dtype: DType) -> None:
        """Make ``array`` a tensor of HBM. It is not copied: what is stored to it lands in it."""
        setattr(self, name, Region(array, dtype, name))

    def alloc(self, key: str, shape: tuple[int, ...], dtype: DType, name: str = "") -> None:
        """A tensor that is NaN until stored to; its traffic counts as ``name``, else ``key``."""
        setattr(self, key, Region(np.full(shape, np.nan, dtype.holder), dtype, name or key))


class Tile:
    """An array in SRAM.

    Methods that return a *new* tile say so; all others overwrite the tile and return it under its
    new name, so that ``P = S.shift(m).exp()`` is exp(S - m) in S's place. A vector [Br] acts on
    the rows of a matrix [Br, Bc].
    """

    __slots__ = ("_array", "_sram", "name", "nbytes", "size")
    __array_ufunc__ = None

    def __init__(self, sram: SRAM, array: Array, width_bytes: int, name: str) -> None:
        self._sram, self._array, self.name, self.size = sram, array, name, array.size
        self.nbytes = self.size * width_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def T(self) -> Tile:
        """The same bytes, read the other way round."""
        width = self.nbytes // max(self.size, 1)
        return type(self)(self._sram, self._array.T, width, self.name)

    def __getattr__(self, name: str) -> NoReturn:
        if name == "_array":  # deleted by SRAM.free
            raise ValueError(f"tile {self.name} was used after it was freed")
        raise AttributeError(f"a tile has no {name!r}")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"tile {self.name} lies in SRAM: only a store gets it out")

    # Matrix products

    def __matmul__(self, other: Tile) -> Tile:
        """New tile: the product."""
        new = self._sram.new(self._array @ other._array, self.name + other.name)
        self._sram.ledger.matmul += 2 * new.size * self._array.shape[1]
        return new._count(0, self, other)

    def accumulate(self, P: Tile, V: Tile, visible: NDArray[np.bool_] | None = None) -> None:
        """self += P @ V. A key hidden from a row takes no part in it, whatever its V holds."""
        p, v = P._array, V._array
        if visible is not None and not np.isfinite(v).all():  # 0 * NaN is NaN: keep hidden V out
            spoiled = np.flatnonzero(~np.isfinite(v).all(axis=1))
            for j in spoiled:
                self._array[visible[:, j]] += p[visible[:, j], j, None] * v[j]
            v = v.copy()
            v[spoiled] = 0
        self._array += p @ v
        self._sram.ledger.matmul += 2 * P.size * v.shape[1]
        self._count(0, self, P, V)

    # Reductions along a row

    def rowmax(self, m: Tile) -> Tile:
        """New tile: max(m, the largest of each row)."""
        largest = self._array.max(axis=1, initial=-np.inf)
        new = self._sram.new(np.maximum(m._array, largest, out=largest), "m")
        return new._count(self.size + m.size, self, m)

    def add_rowsum(self, P: Tile) -> None:
        """self += the sum of each row of P."""
        self._array += P._array.sum(axis=1)
        self._count(P.size + self.size, self, P)

    # Elementwise

    def maximum(self, other: Tile) -> Tile:
        """New tile: the larger, element by element."""
        new = self._sram.new(np.maximum(self._array, other._array), "m")
        return new._count(new.size, self, other)

    def scale(self, factor: float) -> Tile:
        if factor == 0 or self._sram.least <= abs(factor) <= -self._sram.lowest:
            self._array *= factor
        else:  # beyond the range of the arithmetic, which the product may well be within
            mantissa, exponent = math.frexp(factor)
            self._array[...] = np.ldexp(self._array * mantissa, exponent)
        return self._overwritten(self.size, self)

    def hide(self, visible: NDArray[np.bool_] | None) -> Tile:
        """-inf where a key is not visible."""
        if visible is not None:
            self._array[~visible] = -np.inf
        return self

    def shift(self, m: Tile) -> Tile:
        """self - m. An m of -inf, of a row that saw no key yet, counts as the lowest finite number,
        so that exp(-inf - m) is 0 and not NaN."""
        rows = self._array.T
        rows -= np.maximum(m._array, self._sram.lowest)
        return self._overwritten(self.size, self, m)

    def exp(self) -> Tile:
        np.exp(self._array, out=self._array)
        self._sram.ledger.exp += self.size
        return self._overwritten(0, self)

    def log(self) -> Tile:
        np.log(self._array, out=self._array)
        return self._overwritten(self.size, self)

    def __iadd__(self, other: Tile) -> Tile:
        self._array += other._array
        return self._overwritten(self.size, self, other)

    def __imul__(self, c: Tile) -> Tile:
        rows = self._array.T
        rows *= c._array
        return self._overwritten(self.size, self, c)

    def times(self, other: Tile) -> Tile:
        """self * other, element by element."""
        self._array *= other._array
        return self._overwritten(self.size, self, other)

    def __itruediv__(self, l: Tile) -> Tile:
        """self / l, where 0 divides to 0: a row that saw no key has an output of 0."""
        rows = self._array.T
        rows /= l._array
        if not l._array.all():
            self._array[l._array == 0] = 0
        return self._overwritten(self.size, self, l)

    # Counting

    def _count(self, flops: int, *operands: Tile) -> Tile:
        """An operation wrote this tile: each operand is read once, the result written once."""
        ledger = self._sram.ledger
        for t in operands:
            ledger.sram_reads += t.size
            ledger.sram_read_bytes += t.nbytes
        ledger.sram_writes += self.size
        ledger.sram_write_bytes += self.nbytes
        ledger.nonmatmul += flops
        return self

    def _overwritten(self, flops: int, *operands: Tile) -> Tile:
        """As ``_count``, for a result in this tile's place, which must be of accumulator width."""
        if self.nbytes == self.size * self._sram.wide_bytes:
            return self._count(flops, *operands)
        wide = self._sram.new(self._array, self.name)._count(flops, *operands)
        self._sram.free(self)
        return wide


class SRAM:
    """One program's fast memory: makes tiles, holds them to ``capacity_bytes`` (None: unbounded).

    ``dtype`` is the storage format of the problem; arithmetic uses its accumulator.

    >>> from simattn.dtypes import FLOAT32
    >>> hbm, sram = HBM(), SRAM(FLOAT32, capacity_bytes=100)
    >>> hbm.place("Q", np.ones((4, 6), np.float32), FLOAT32)
    >>> Q = sram.load(hbm.Q[0:4])
    >>> sram.ledger.counts().traffic.reads, sram.live_bytes
    ({'Q': 24}, 96)
    >>> Q @ Q.T
    Traceback (most recent call last):
    ...
    simattn.memory.SRAMCapacityError: SRAM: tile QQ needs 64 bytes; live: Q 96; capacity: 100
    """

    tile = Tile  # the class of its tiles: a recorder puts its own here

    def __init__(
        self, dtype: DType, capacity_bytes: int | None = None, ledger: Ledger | None = None
    ) -> None:
        self.accumulator = dtype.accumulator
        self.capacity_bytes = capacity_bytes
        self.ledger = Ledger() if ledger is None else ledger
        self.live_bytes = 0
        self.wide_bytes = self.accumulator.width_bytes
        limits = np.finfo(self.accumulator.holder)
        self.lowest, self.least = limits.min, limits.smallest_normal
        self._live: set[Tile] = set()

    def load(self, region: Region) -> Tile:
        array = region._data.astype(self.accumulator.holder)
        width = region.dtype.width_bytes
        tile = self._admit(self.tile(self, array, width, region.name))
        self.ledger.reads[region.name, width] += array.size
        return tile._count(0)

    def store(self, region: Region, tile: Tile) -> None:
        """Round to the region's format and write it. The tile stays live."""
        if region.shape != tile.shape:
            raise ValueError(
                f"store of tile {tile.name} {tile.shape} to {region.name} {region.shape}"
            )
        region._data[...] = region.dtype.round(tile._array)
        ledger = self.ledger
        ledger.writes[region.name, region.dtype.width_bytes] += tile.size
        ledger.sram_reads += tile.size
        ledger.sram_read_bytes += tile.nbytes

    def full(self, shape: tuple[int, ...], value: float, name: str) -> Tile:
        """New tile of one value, at accumulator width."""
        return self.new(np.full(shape, value, self.accumulator.holder), name)._count(0)

    def free(self, *tiles: Tile) -> None:
        for tile in tiles:
            if tile not in self._live:
                raise ValueError(f"tile {tile.name} is not live here: it can't be freed")
            self._live.remove(tile)
            self.live_bytes -= tile.nbytes
            del tile._array

    def new(self, array: Array, name: str) -> Tile:
        """A computed tile, not yet counted as written."""
        return self._admit(self.tile(self, array, self.wide_bytes, name))

    def _admit(self, tile: Tile) -> Tile:
        live = self.live_bytes + tile.nbytes
        if self.capacity_bytes is not None and live > self.capacity_bytes:
            others = ", ".join(sorted(f"{t.name} {t.nbytes}" for t in self._live)) or "none"
            raise SRAMCapacityError(
                f"SRAM: tile {tile.name} needs {tile.nbytes} bytes; live: {others}; "
                f"capacity: {self.capacity_bytes}"
            )
        self._live.add(tile)
        self.live_bytes = live
        if live > self.ledger.peak_bytes:
            self.ledger.peak_bytes = live
        return tile
