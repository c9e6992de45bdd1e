"""What sm_90a does on its own: tensor copies that fill shared memory, products that read it.

Copies land at once (``early``), or late: when no warp can go on, those that somebody waits for, the
last first. Products are computed when they begin, or when they are awaited. Until then a copy's
bytes and a product's operands and sums are in flight, and whoever touches them is at fault. What a
copy brought are its mbarrier's writes: only who waited for that barrier's phase may read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .memory import SECTOR, SHARED_BASE
from .races import GRANULE, UNITS

if TYPE_CHECKING:
    from .warp import Warp

ROW_BYTES, SWIZZLED_BYTES = 128, 1024


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor [.., rows, columns] as copies see it, in boxes of ``rows`` rows of 128 bytes."""

    array: np.ndarray
    rows: int


@dataclass(slots=True)
class MBarrier:
    """Arrivals and bytes that a phase still waits for, and what those who came have to tell."""

    unit: int  # its column in the clocks
    count: int
    missing: int
    bytes: int = 0
    phase: int = 0
    heard: np.ndarray | None = None
    told: np.ndarray | None = None


@dataclass(slots=True)
class Load:
    """A tensor copy under way."""

    barrier: MBarrier
    granules: np.ndarray
    move: Callable[[], None]
    size: int


@dataclass(slots=True)
class Product:
    """A warp's part of a product under way."""

    acc: Any
    granules: np.ndarray
    compute: Callable[[], None]


@dataclass(slots=True)
class Machine:
    """A block's barriers and copies."""

    barriers: dict[int, MBarrier] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    awaited: list[MBarrier] = field(default_factory=list)


class Hopper:
    """A warp's side of it."""

    def __init__(self, warp: Warp, machine: Machine) -> None:
        self.warp, self.machine = warp, machine
        self.open: list[Product] = []
        self.groups: list[list[Product]] = []

    # ---- mbarriers

    def init(self, address: np.ndarray, count: np.ndarray) -> None:
        warp, machine = self.warp, self.machine
        warp.store_shared(address, np.zeros((32, 8), np.uint8))
        for lane in warp.active():
            at = int(address[lane])
            unit = warp.block.clocks.threads + len(machine.barriers) % UNITS
            machine.barriers[at] = MBarrier(unit, int(count[lane]), int(count[lane]))

    def _find(self, address: int, lane: int) -> MBarrier | None:
        """The barrier, if this lane has heard of its initialisation."""
        warp = self.warp
        barrier = self.machine.barriers.get(address)
        if barrier is None:
            warp.fault("barrier", f"no mbarrier at shared address {address - SHARED_BASE}")
            return None
        granule = np.array([(address - SHARED_BASE) // GRANULE])
        shadow, thread = warp.block.shadow, warp.threads[lane]
        if warp.block.clocks.known[thread, shadow.writer[granule]] < shadow.written[granule]:
            warp.fault(
                "race", "uses an mbarrier whose initialisation no barrier has ordered before"
            )
        return barrier

    def arrive(self, address: np.ndarray, size: np.ndarray | None) -> None:
        warp = self.warp
        for lane in warp.active():
            barrier = self._find(int(address[lane]), lane)
            if barrier is None:
                continue
            heard = warp.block.clocks.release(warp.threads[lane : lane + 1])
            barrier.heard = heard if barrier.heard is None else np.maximum(barrier.heard, heard)
            barrier.bytes += 0 if size is None else int(size[lane])
            barrier.missing -= 1
            if barrier.missing < 0:
                warp.fault("barrier", f"more than {barrier.count} arrivals in an mbarrier's phase")
                barrier.missing = 0
            self._turn(barrier)

    def _turn(self, barrier: MBarrier) -> None:
        if barrier.missing == 0 and barrier.bytes == 0:
            barrier.phase += 1
            barrier.missing, barrier.told, barrier.heard = barrier.count, barrier.heard, None
            if barrier.told is not None:
                barrier.told[barrier.unit] = barrier.phase

    def wait(self, address: np.ndarray, parity: np.ndarray) -> None:
        warp = self.warp
        lanes = warp.active()
        if not lanes.size:
            return
        lane = int(lanes[0])  # the active lanes wait for the same barrier
        barrier = self._find(int(address[lane]), lane)
        if barrier is None:
            return
        wanted = int(parity[lane]) & 1
        self.machine.awaited.append(barrier)
        warp.wait_until(lambda: (barrier.phase & 1) != wanted, "mbar_wait")
        self.machine.awaited.remove(barrier)
        if barrier.told is not None:
            warp.block.clocks.acquire(warp.threads[lanes], barrier.told)

    # ---- tensor copies

    def load(self, shared, address, at, barrier_address) -> None:
        warp = self.warp
        for lane in warp.active():
            barrier = self._find(int(barrier_address[lane]), lane)
            tensor_map = warp.block.memory.maps.get(int(address[lane]))
            if tensor_map is None:
                warp.fault("bounds", f"no tensor map at {int(address[lane])}")
            elif barrier is not None:
                corner = [int(x[lane]) for x in at]
                self._load(int(shared[lane]), tensor_map, corner, barrier, warp.threads[lane])

    def _load(self, shared: int, tensor_map, corner: list[int], barrier: MBarrier, thread) -> None:
        warp, block = self.warp, self.warp.block
        name, target = tensor_map
        _rows, size = target.rows, target.rows * ROW_BYTES
        if shared % SWIZZLED_BYTES:
            warp.fault("alignment", f"a box at shared address {shared}, no multiple of 1024")
            return
        if not block.shared.inside(np.array([shared]), size)[0]:
            warp.fault("bounds", f"a box of {size} bytes at {shared - SHARED_BASE} shared")
            return
        box, moved = _box(target, corner)
        traffic = block.report.tensors[name]
        traffic.read_bytes += moved
        traffic.read_sectors += size // SECTOR  # the chip fetches the whole box
        places = swizzled(shared + np.arange(size)) - SHARED_BASE
        granules = ((shared - SHARED_BASE) // GRANULE + np.arange(size // GRANULE))[None]
        warp.say(block.shadow.take_off(np.array([thread]), granules))

        def move() -> None:
            block.shared.data[places] = box
            block.report.shared.write_bytes += size
            block.shadow.flying[granules] = False
            block.shadow.writer[granules] = barrier.unit
            block.shadow.written[granules] = barrier.phase + 1
            block.shadow.seen[:, granules] = 0
            barrier.bytes -= size
            self._turn(barrier)

        if block.early:
            move()
        else:
            self.machine.loads.append(Load(barrier, granules, move, size))

    # ---- products

    def begin_product(self, acc, a, b, adds, columns: int, widen, b_transposed: bool) -> None:
        warp = self.warp
        if not warp.together("wgmma"):
            return
        in_registers = len(a) == 4
        b_places = _operand(b, columns, b_transposed)  # [columns, 16], of elements
        places = [b_places]
        if not in_registers:
            a_places = _operand(a[0], 64, False)[16 * (warp.index % 4) :][:16]
            places.append(a_places)
        granules = np.unique(np.concatenate([x.reshape(-1) for x in places]) // GRANULE)
        if granules[-1] * GRANULE + GRANULE > warp.block.shared.data.size or granules[0] < 0:
            warp.fault("bounds", "a wgmma operand reaches outside shared memory")
            return
        warp.say(warp.block.shadow.read(warp.index, warp.threads[:1], granules[None]))
        warp.block.shadow.busy[granules] += 1
        warp.report.instructions[f"wgmma_n{columns}"] += 1
        warp.report.shared.read_bytes += 2 * sum(x.size for x in places[warp.index % 4 > 0 :])
        registers = [np.array(x) for x in a] if in_registers else None
        keep = bool(np.asarray(adds).reshape(-1)[0])

        def compute() -> None:
            from ..ptx import rows_of_a

            A = rows_of_a(widen, registers) if in_registers else self._matrix(a_places, widen)
            C = A @ self._matrix(b_places, widen).T  # [16, columns]
            lanes = C.reshape(2, 8, columns // 8, 4, 2).transpose(2, 0, 4, 1, 3)
            for i, value in enumerate(lanes.reshape(columns // 2, 32)):
                acc.values[i] = acc.values[i] + value if keep else value

        if warp.block.early:
            compute()
        self.open.append(Product(acc, granules, compute))
        acc.in_flight += 1

    def _matrix(self, places: np.ndarray, widen) -> np.ndarray:
        data = self.warp.block.shared.data
        pairs = data[places] | data[places + 1].astype(np.uint32) << 8
        return widen(pairs)[..., 0]

    def commit_products(self) -> None:
        if self.warp.together("wgmma_commit"):
            self.groups.append(self.open)
            self.open = []

    def wait_products(self, pending: int) -> None:
        if not self.warp.together("wgmma_wait"):
            return
        shadow = self.warp.block.shadow
        while len(self.groups) > pending:
            for product in self.groups.pop(0):
                if not self.warp.block.early:
                    product.compute()
                product.acc.in_flight -= 1
                shadow.busy[product.granules] -= 1
                shadow.reader[self.warp.index, product.granules] = self.warp.threads[0]
                now = self.warp.block.clocks.now(self.warp.threads[:1])[0]
                shadow.seen[self.warp.index, product.granules] = now


def land(machine: Machine) -> bool:
    """Let an awaited copy land, the last that was begun. False if nobody waits for one."""
    for i in reversed(range(len(machine.loads))):
        if any(machine.loads[i].barrier is barrier for barrier in machine.awaited):
            machine.loads.pop(i).move()
            return True
    return False


def swizzled(address: np.ndarray) -> np.ndarray:
    """128-byte swizzle: the chunk's number in its row, changed by the row's modulo 8."""
    return address ^ ((address >> 7 & 7) << 4)


def _operand(desc, length: int, transposed: bool) -> np.ndarray:
    """Places [length, 16] in shared memory of a matrix's elements, 2 bytes each."""
    address, leading, stride = desc
    start = int(np.asarray(address).reshape(-1)[0])
    i, k = np.arange(length)[:, None], np.arange(16)[None]
    if transposed:
        at = start + i // 64 * leading + k // 8 * stride + k % 8 * ROW_BYTES + i % 64 * 2
    else:
        at = start + i // 8 * stride + i % 8 * ROW_BYTES + k * 2
    return swizzled(at) - SHARED_BASE


def _box(target: TensorMap, corner: list[int]) -> tuple[np.ndarray, int]:
    """The box's bytes, zeros where the tensor has ended, and how many are the tensor's."""
    x, y, *z = corner
    matrix = target.array[z[0]] if z else target.array
    columns = ROW_BYTES // target.array.itemsize
    box = np.zeros((target.rows, columns), target.array.dtype)
    inside = matrix[max(0, y) : max(0, y + target.rows), max(0, x) : max(0, x + columns)]
    top, left = max(0, -y), max(0, -x)
    box[top : top + inside.shape[0], left : left + inside.shape[1]] = inside
    return box.reshape(-1).view(np.uint8), inside.nbytes
