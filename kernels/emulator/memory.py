"""Global and shared memory: bounds, alignment, values, bytes counted, bank conflicts.

Tensors lie far apart, beyond the reach of 32-bit addresses, and only their own elements may be
touched: the gap between two rows of a view is as forbidden as the space after the last. Reads that
are refused give 0xFF bytes, NaN in every float format; refused writes are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .report import SECTOR_BYTES, Report, TensorTraffic

BANKS, BANK_BYTES = 32, 4
FIRST_ADDRESS, APART = 1 << 44, 1 << 42
MAP_BYTES = 128
MOST_ROWS = 256  # of a box
SHARED_BASE = 1024 + 48  # aligned to 16 and no more: a kernel that needs more must see to it


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor at strides of the caller's choice, in elements, larger than any array could be.

    The last axis is contiguous.
    """

    array: np.ndarray
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor [.., rows, columns] as copies see it, in boxes of ``rows`` rows of 128 bytes."""

    array: np.ndarray | Placed
    rows: int


@dataclass(frozen=True, slots=True)
class Mapped:
    """A tensor map in a launch: the address of the first element, strides in bytes."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    rows: int

    def __post_init__(self) -> None:
        """The rules of cuTensorMapEncodeTiled."""
        if not 2 <= len(self.shape) <= 4 or 0 in self.shape:
            raise ValueError(f"{self.name}: no tensor map of shape {self.shape}: 2 to 4 axes, no 0")
        if self.rows not in range(1, MOST_ROWS + 1):
            raise ValueError(f"{self.name}: boxes of {self.rows!r} rows: 1 to {MOST_ROWS}")
        if any(stride % 16 for stride in self.strides[:-1]):
            raise ValueError(f"{self.name}: no tensor map of strides {self.strides}, in bytes: all "
                             "but the last must be multiples of 16")  # fmt: skip


class Address(int):
    """Where a tensor lies. A number, as kernels for a GPU have it."""

    def __getitem__(self, index):
        raise TypeError("a tensor is an address in this kernel: use ld_global_* and st_global_*")

    def __setitem__(self, index, value):
        self[index]


class GlobalMemory:
    """The launch's tensors, by address."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.names: list[str] = []
        self.maps: dict[int, Mapped] = {}
        self.sources: list[np.ndarray] = []
        self.parts: list[np.ndarray] = []  # each tensor's bytes, contiguous
        self.sizes = 0
        starts: list[np.ndarray] = []
        self._rows = starts, [], [], []  # first address, bytes, place in data, tensor

    def place(self, name: str, tensor: np.ndarray | Placed) -> int:
        """Give a tensor its address."""
        array, strides = _layout(tensor)
        if array.dtype.hasobject:
            raise TypeError(f"{name}: an array of {array.dtype}, which has no bytes of its own")
        if name in self.report.tensors:
            raise ValueError(f"names: two tensors are called {name!r}")
        index = len(self.names)
        address = Address(FIRST_ADDRESS + index * APART)
        self.names.append(name)
        self.sources.append(array)
        self.parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        self.report.tensors[name] = TensorTraffic()
        if array.size:
            self._add_rows(index, address, array.shape, array.itemsize, strides)
        self.sizes += array.nbytes
        return address

    def place_map(self, name: str, target: TensorMap) -> int:
        """Give a tensor map its address. If its array is among the tensors, it is that one's."""
        array, strides = _layout(target.array)
        same = [i for i, other in enumerate(self.sources) if _is_same(array, other)]
        mapped = {x.name for x in self.maps.values()}
        same.sort(key=lambda i: self.names[i] in mapped)  # twice the same: one map each
        if same:
            name, address = self.names[same[0]], FIRST_ADDRESS + same[0] * APART
        else:
            address = self.place(name, target.array)
        at = FIRST_ADDRESS // 2 + len(self.maps) * MAP_BYTES
        size = array.itemsize
        in_bytes = tuple(stride * size for stride in strides)
        self.maps[at] = Mapped(name, address, array.shape, in_bytes, size, target.rows)
        return at

    def _add_rows(self, index, address, shape, itemsize, strides) -> None:
        width = shape[-1] if shape else 1
        if width > 1 and strides[-1] != 1:
            raise ValueError(f"{self.names[index]}: last axis has stride {strides[-1]}, not 1")
        offsets = np.zeros((), np.int64)
        for length, stride in zip(shape[:-1], strides[:-1], strict=True):
            offsets = offsets[..., None] + np.arange(length, dtype=np.int64) * stride
        offsets = offsets.reshape(-1) * itemsize
        if np.abs(offsets).max(initial=0) >= APART // 2:
            raise ValueError(f"{self.names[index]}: strides {strides} reach too far")
        place = self.sizes + np.arange(offsets.size, dtype=np.int64) * width * itemsize
        lengths = np.full(offsets.size, width * itemsize)
        if offsets.size and (np.diff(offsets) == width * itemsize).all():  # one piece
            offsets, place, lengths = offsets[:1], place[:1], lengths.sum(keepdims=True)
        order = np.argsort(offsets, kind="stable")
        offsets, place, lengths = offsets[order], place[order], lengths[order]
        for kept, part in zip(
            self._rows,
            (address + offsets, lengths, place, np.full(offsets.size, index)),
            strict=True,
        ):
            kept.append(part)

    def ready(self) -> None:
        """All tensors are placed."""
        empty = [np.zeros(0, np.int64)]
        self.first, self.length, self.place_of, self.tensor = (
            np.concatenate(x or empty) for x in self._rows
        )
        order = np.argsort(self.first, kind="stable")
        self.first, self.length = self.first[order], self.length[order]
        self.place_of, self.tensor = self.place_of[order], self.tensor[order]
        overlap = self.first[1:] < self.first[:-1] + self.length[:-1]
        if overlap.any():
            raise ValueError(f"{self.names[self.tensor[np.argmax(overlap)]]}: its rows overlap")
        self.data = np.concatenate(self.parts) if self.parts else np.zeros(0, np.uint8)

    def write_back(self) -> None:
        """Copy what the kernel changed into the caller's arrays."""
        at = 0
        for name, array, part in zip(self.names, self.sources, self.parts, strict=True):
            now = self.data[at : at + part.size]
            changed = np.flatnonzero(now != part)
            if changed.size and not array.flags.writeable:
                raise ValueError(f"{name}: the kernel wrote to a read-only array")
            if changed.size:  # another argument may hold the rest
                flat = np.array(array, order="C").reshape(-1)
                flat.view(np.uint8)[changed] = now[changed]
                array[...] = flat.reshape(array.shape)
            at += part.size

    def describe(self, address: int) -> str:
        """An address in words: tensor and bytes from its first element."""
        index = (address - FIRST_ADDRESS + APART // 2) // APART
        if not 0 <= index < len(self.names):
            return f"address {address}, near no tensor"
        return f"{self.names[index]} + {address - FIRST_ADDRESS - index * APART} bytes"

    def locate(self, address: np.ndarray, size: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """Place in ``data`` and row; row -1 where the bytes are not all in one row."""
        row = np.searchsorted(self.first, address, side="right") - 1
        if not self.first.size:
            return address, np.full(address.shape, -1)
        offset = address - self.first[row]
        inside = (row >= 0) & (offset + size <= self.length[row])
        return self.place_of[row] + offset, np.where(inside, row, -1)

    def count(self, address: np.ndarray, size: np.ndarray, row: np.ndarray, writes: bool) -> None:
        """Add up what lanes with a row move."""
        for tensor in np.unique(self.tensor[row]):
            mine = self.tensor[row] == tensor
            traffic = self.report.tensors[self.names[tensor]]
            moved = int(size[mine].sum())
            ends = np.concatenate((address[mine], address[mine] + size[mine] - 1))
            sectors = np.unique(ends // SECTOR_BYTES).size
            if writes:
                traffic.write_bytes += moved
                traffic.write_sectors += sectors
            else:
                traffic.read_bytes += moved
                traffic.read_sectors += sectors


class SharedMemory:
    """One block's shared memory, from address ``SHARED_BASE`` on; it begins as garbage."""

    def __init__(self, size: int, report: Report) -> None:
        self.data = np.full(size, 0xFF, np.uint8)
        self.report = report

    def inside(self, address: np.ndarray, size: int) -> np.ndarray:
        offset = address - SHARED_BASE
        return (offset >= 0) & (offset + size <= self.data.size)

    def count(self, lanes: np.ndarray, address: np.ndarray, size: int, writes: bool) -> int:
        """Add up an access by these lanes; returns its bank conflicts."""
        shared = self.report.shared
        passes, needed = wavefronts(lanes, address, size)
        if writes:
            shared.write_bytes += address.size * size
            shared.write_wavefronts += passes
        else:
            shared.read_bytes += address.size * size
            shared.read_wavefronts += passes
        shared.conflicts += passes - needed
        return passes - needed


def _layout(tensor: np.ndarray | Placed) -> tuple[np.ndarray, tuple[int, ...]]:
    """The array, and strides in elements."""
    if isinstance(tensor, Placed):
        return tensor.array, tensor.strides
    return tensor, tuple(stride // tensor.itemsize for stride in tensor.strides)


def _is_same(array: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays are the same elements at the same places, axes of length 1 aside."""
    axes = [[x for x in zip(y.shape, y.strides, strict=True) if x[0] > 1] for y in (array, other)]
    return array.ctypes.data == other.ctypes.data and axes[0] == axes[1]


def wavefronts(lanes: np.ndarray, address: np.ndarray, size: int) -> tuple[int, int]:
    """Passes over the banks that an access takes, and that it would take without conflicts.

    Lanes go in groups that ask for at most 128 bytes: 32 lanes of 4, 16 of 8, 8 of 16. In a group
    each bank serves one word a pass; lanes that want the same word share it.

    >>> lanes = np.arange(32)
    >>> wavefronts(lanes, lanes * 4, 4), wavefronts(lanes, lanes * 8, 4)
    ((1, 1), (2, 1))
    >>> wavefronts(lanes, lanes * 128, 16)  # eight rows in the same four banks
    (32, 4)
    """
    group = BANKS * BANK_BYTES // max(size, BANK_BYTES)
    if size == 16 and address.size == 32:  # quickly, for the usual case: eight different places
        places = np.bitwise_or.reduce(1 << (address.reshape(4, 8) // 16 % 8), axis=1)
        if (places == 0xFF).all():
            return 4, 4
    passes = needed = 0
    for first in range(0, 32, group):
        part = address[(lanes >= first) & (lanes < first + group)]
        if part.size:
            words = part[:, None] // BANK_BYTES + np.arange(max(1, size // BANK_BYTES))
            words = np.unique(words)
            passes += int(np.bincount(words % BANKS).max())
            needed += 1
    return passes, needed


def grid_of(extent: int | Sequence[int]) -> tuple[int, int, int]:
    """A grid or block as three whole numbers.

    >>> grid_of(7), grid_of((2, 3))
    ((7, 1, 1), (2, 3, 1))
    """
    given = tuple(extent) if isinstance(extent, Sequence) else (extent,)
    whole = all(isinstance(x, int | np.integer) and x >= 1 for x in given)
    if not 1 <= len(given) <= 3 or not whole:
        raise ValueError(f"grid, block: {extent!r} must be one to three whole numbers >= 1")
    x, y, z = (*map(int, given), 1, 1)[:3]
    return x, y, z
