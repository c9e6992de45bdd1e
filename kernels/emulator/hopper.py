"""What sm_90a does on its own: tensor copies to and from shared memory, products that read it.

Loads land at once (``early``), or late: when no warp can go on, those that somebody waits for, the
last first. Products and stores happen when they begin, or when they are awaited. Until then what a
load fills, what a store reads, and a product's operands and sums are in flight, and whoever touches
them is at fault. What a load brought are its mbarrier's writes: only who waited for that barrier's
phase may read them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tensor_core import multiply_add
from .boxes import ROW_BYTES, SWIZZLED_BYTES, Box, box_of, swizzled
from .copies import CopyGroups
from .memory import SHARED_BASE, Mapped
from .races import GRANULE, READ, UNITS, WRITE
from .report import SECTOR_BYTES

if TYPE_CHECKING:
    from .warp import Warp

WARPS = 4  # of a warpgroup


@dataclass(slots=True)
class MBarrier:
    """Arrivals and bytes that a phase still waits for, and what those who came have to tell."""

    unit: int  # its column in the clocks
    count: int
    missing: int
    bytes: int = 0
    phase: int = 0
    heard: np.ndarray | None = None
    told: np.ndarray | None = None  # by the arrivals of the phase before
    copied: bool = False  # bytes too come in this phase
    was_copied: bool = False  # came in the phase before


@dataclass(slots=True)
class Load:
    """A tensor copy to shared memory under way."""

    barrier: MBarrier
    move: Callable[[], None]


@dataclass(slots=True)
class Store:
    """A tensor copy from shared memory under way."""

    thread: int
    granules: np.ndarray
    place: np.ndarray  # of what it writes, in global memory's data
    move: Callable[[], None]
    reads: bool = True  # shared memory, still


@dataclass(slots=True)
class Product:
    """A warp's part of a product under way."""

    acc: Any
    granules: np.ndarray
    compute: Callable[[], None]


@dataclass(slots=True)
class Machine:
    """A block's barriers and copies, and the registers that its warps may take."""

    registers: int | None  # a thread has at launch; None: not counted
    free: int = 0  # given back, in registers of a warp's threads
    barriers: dict[int, MBarrier] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    awaited: list[MBarrier] = field(default_factory=list)


class Hopper:
    """A warp's side of it."""

    def __init__(self, warp: Warp, machine: Machine) -> None:
        self.warp, self.machine = warp, machine
        self.open: list[Product] = []
        self.groups: list[list[Product]] = []
        self.stores: dict[int, CopyGroups[Store]] = {}  # by lane
        self.registers = machine.registers
        self.fences = 0  # of registers, so far
        self.fresh: dict[int, Any] = {}  # registers written since the last fence, by identity
        self.steps: Counter[str] = Counter()  # what the warps of a warpgroup do together

    def together(self, what: str) -> bool:
        """All lanes take part, and, which is seen at the end, all warps of the warpgroup."""
        self.steps[what] += 1
        return self.warp.together(what)

    # ---- mbarriers

    def init(self, address: np.ndarray, count: np.ndarray) -> None:
        warp, machine = self.warp, self.machine
        warp.store_shared(address, np.zeros((32, 8), np.uint8))
        for lane in warp.active():
            at = int(address[lane])
            unit = warp.block.clocks.threads + len(machine.barriers) % UNITS
            machine.barriers[at] = MBarrier(unit, int(count[lane]), int(count[lane]))

    def fence_barriers(self) -> None:
        self.warp.block.clocks.fence(self.warp.threads[self.warp.active()], "mbarrier")

    def _find(self, address: int, lane: int, *, for_copy: bool = False) -> MBarrier | None:
        """The barrier, if this lane has heard of its initialisation."""
        warp = self.warp
        barrier = self.machine.barriers.get(address)
        if barrier is None:
            warp.fault("barrier", f"no mbarrier at shared address {address - SHARED_BASE}")
            return None
        granule = np.array([(address - SHARED_BASE) // GRANULE])
        shadow, clocks, thread = warp.block.shadow, warp.block.clocks, warp.threads[lane]
        writer, written = shadow.writer[granule], shadow.written[granule]
        if clocks.known[thread, writer] < written:
            warp.fault(
                "race", "uses an mbarrier whose initialisation no barrier has ordered before"
            )
        elif for_copy and not clocks.fenced(thread, writer, written, "mbarrier"):
            warp.fault("fence", "a copy uses an mbarrier with no mbar_init_fence after its init")
        return barrier

    def arrive(self, address: np.ndarray, size: np.ndarray | None) -> None:
        warp = self.warp
        for lane in warp.active():
            barrier = self._find(int(address[lane]), lane)
            if barrier is None:
                continue
            self._check_order(barrier, warp.threads[lane])
            heard = warp.block.clocks.release(warp.threads[lane : lane + 1])
            barrier.heard = heard if barrier.heard is None else np.maximum(barrier.heard, heard)
            barrier.bytes += 0 if size is None else int(size[lane])
            barrier.copied |= size is not None
            barrier.missing -= 1
            if barrier.missing < 0:
                warp.fault("barrier", f"more than {barrier.count} arrivals in an mbarrier's phase")
                barrier.missing = 0
            self._turn(barrier)

    def _check_order(self, barrier: MBarrier, thread: int) -> None:
        """Who arrives knows that the phase before is over: else it might count for that one.

        It has heard of the phase's end, or of every arrival in it if there was nothing else.
        """
        clocks = self.warp.block.clocks
        if barrier.told is None or clocks.known[thread, barrier.unit] >= barrier.phase:
            return
        if barrier.was_copied or not clocks.have_heard(thread, barrier.told):
            self.warp.fault(
                "race", "arrives at an mbarrier and may count for the phase before, of whose end "
                "no barrier has told it"
            )  # fmt: skip

    def _turn(self, barrier: MBarrier) -> None:
        if barrier.missing == 0 and barrier.bytes == 0:
            barrier.phase += 1
            barrier.copied, barrier.was_copied = False, barrier.copied
            barrier.missing, barrier.told, barrier.heard = barrier.count, barrier.heard, None

    def wait(self, address: np.ndarray, parity: np.ndarray) -> None:
        lanes = self.warp.active()
        for at, odd in sorted({(int(address[lane]), int(parity[lane]) & 1) for lane in lanes}):
            self._wait(at, odd, lanes[(address[lanes] == at) & (parity[lanes] & 1 == odd)])

    def _wait(self, address: int, parity: int, lanes: np.ndarray) -> None:
        warp = self.warp
        barrier = self._find(address, int(lanes[0]))
        if barrier is None:
            return
        self.machine.awaited.append(barrier)
        warp.wait_until(lambda: (barrier.phase & 1) != parity, "mbar_wait")
        self.machine.awaited.remove(barrier)
        if barrier.told is not None:
            clocks, threads = warp.block.clocks, warp.threads[lanes]
            clocks.acquire(threads, barrier.told)
            clocks.known[threads, barrier.unit] = barrier.phase

    # ---- tensor copies

    def load(self, shared, address, at, barrier_address) -> None:
        """Begin to fill a box a lane; the barrier counts its bytes."""
        for lane, mapped, box in self._boxes(shared, address, at):
            barrier = self._find(int(barrier_address[lane]), lane, for_copy=True)
            if barrier is not None:
                self._load(mapped, box, barrier, self.warp.threads[lane])

    def _load(self, mapped: Mapped, box: Box, barrier: MBarrier, thread: int) -> None:
        block, size = self.warp.block, box.places.size
        source = self._elements(mapped, box, thread, READ)
        traffic = block.report.tensors[mapped.name]
        traffic.read_bytes += source.size
        traffic.read_sectors += size // SECTOR_BYTES  # the chip fetches the whole box
        granules = _granules(box.places)
        self.warp.say(block.shadow.take_off(np.array([thread]), granules[None]))

        def move() -> None:
            block.shared.data[box.places] = 0
            block.shared.data[box.places[box.inside]] = block.memory.data[source]
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
            self.machine.loads.append(Load(barrier, move))

    def store(self, shared, address, at) -> None:
        """Begin to copy a box a lane to global memory."""
        for lane, mapped, box in self._boxes(shared, address, at):
            self._store(mapped, box, int(lane))

    def _store(self, mapped: Mapped, box: Box, lane: int) -> None:
        warp, block = self.warp, self.warp.block
        thread = int(warp.threads[lane])
        source = box.places[box.inside]
        target = self._elements(mapped, box, thread, WRITE)
        block.global_order.unsettle(target)
        sectors = (box.address[:, None] + np.arange(box.width)) // SECTOR_BYTES
        traffic = block.report.tensors[mapped.name]
        traffic.write_bytes += target.size
        traffic.write_sectors += np.unique(sectors).size
        granules = _granules(source)
        warp.say(block.shadow.read_asynchronously(warp.index, thread, granules))
        block.shadow.busy[granules] += 1

        def move() -> None:
            block.memory.data[target] = block.shared.data[source]
            block.report.shared.read_bytes += source.size

        if block.early:
            move()
        groups = self.stores.setdefault(lane, CopyGroups())
        groups.open.append(Store(thread, granules, target, move))

    def commit_stores(self) -> None:
        for lane in self.warp.active():
            self.stores.setdefault(int(lane), CopyGroups()).commit()

    def wait_stores(self, pending: int, *, written: bool) -> None:
        """Let groups of the active lanes read shared memory, and, if ``written``, be done."""
        block = self.warp.block
        for lane in self.warp.active():
            groups = self.stores.get(int(lane), CopyGroups())
            for store in groups.due(pending, keep=not written):
                self.finish_reading(store)
                if written:
                    block.global_order.settle(block.clocks, store.thread, store.place)

    def finish_reading(self, store: Store) -> None:
        block = self.warp.block
        if store.reads:
            store.reads = False
            if not block.early:
                store.move()
            block.shadow.busy[store.granules] -= 1
            block.shadow.note_read(self.warp.index, store.thread, store.granules)

    def fence_writes(self) -> None:
        threads = self.warp.threads[self.warp.active()]
        self.warp.block.clocks.fence(threads, "writes", "mbarrier")

    def _boxes(self, shared, address, at) -> Iterator[tuple[int, Mapped, Box]]:
        """What each active lane asks for, unless that is refused."""
        warp, block = self.warp, self.warp.block
        for lane in warp.active():
            start, mapped = int(shared[lane]), block.memory.maps.get(int(address[lane]))
            if mapped is None:
                warp.fault("bounds", f"no tensor map at {int(address[lane])}")
                continue
            size = mapped.rows * ROW_BYTES
            if len(at) != len(mapped.shape):
                axes = len(mapped.shape)
                warp.fault("bounds", f"{len(at)} coordinates for {mapped.name} of {axes} axes")
            elif start % SWIZZLED_BYTES:
                said = f"a box at shared address {start}, no multiple of {SWIZZLED_BYTES}"
                warp.fault("alignment", said)
            elif not block.shared.inside(np.array([start]), size)[0]:
                said = f"a box of {size} bytes at {start - SHARED_BASE} shared"
                warp.fault("bounds", said)
            else:
                yield lane, mapped, box_of(mapped, [_signed(x[lane]) for x in at], start)

    def _elements(self, mapped: Mapped, box: Box, thread: int, kind: int) -> np.ndarray:
        """Places [rows, bytes] in global memory's data that a copy touches."""
        block = self.warp.block
        place, _ = block.memory.locate(box.address, box.width)
        at = place[:, None] + np.arange(box.width)
        threads = np.full(place.size, thread)
        if block.global_order.touch(block.number, block.clocks, threads, at, kind):
            self.warp.say("race", f"elements of {mapped.name}")
        return at

    # ---- products

    def begin_product(self, acc, a, b, adds, columns: int, widen, b_transposed: bool) -> None:
        warp = self.warp
        if not self.together("wgmma"):
            return
        in_registers = len(a) == 4
        b_places = _operand(b, columns, b_transposed)  # [columns, 16], of elements
        places = [b_places]
        if not in_registers:
            a_places = _operand(a[0], 64, False)[16 * (warp.index % WARPS) :][:16]
            places.append(a_places)
        granules = np.concatenate([x.reshape(-1) for x in places]) // GRANULE
        if granules.max() >= warp.block.shared.data.size // GRANULE or granules.min() < 0:
            warp.fault("bounds", "a wgmma operand reaches outside shared memory")
            return
        self._check_registers(acc, a if in_registers else ())
        warp.say(warp.block.shadow.read_asynchronously(warp.index, int(warp.threads[0]), granules))
        warp.block.shadow.busy[granules] += 1
        warp.report.instructions[f"wgmma_n{columns}"] += 1
        warp.report.shared.read_bytes += 2 * sum(x.size for x in places[warp.index % WARPS > 0 :])
        registers = [np.array(x) for x in a] if in_registers else None
        keep = bool(np.asarray(adds).reshape(-1)[0])

        def compute() -> None:
            from ..ptx import rows_of_a

            A = rows_of_a(widen, registers) if in_registers else self._matrix(a_places, widen)
            C = np.zeros((16, columns), np.float32)
            if keep:
                sums = np.empty((columns // 2, 32), np.float32)
                for i in range(columns // 2):
                    sums[i] = acc.values[i]
                sums = sums.reshape(columns // 8, 2, 2, 8, 4)  # [tile, row half, pair, g, t]
                C = sums.transpose(1, 3, 0, 4, 2).reshape(16, columns)
            C = multiply_add(A, self._matrix(b_places, widen).T, C)
            sums = C.reshape(2, 8, columns // 8, 4, 2).transpose(2, 0, 4, 1, 3)
            acc.values[: columns // 2] = sums.reshape(columns // 2, 32)

        if warp.block.early:
            compute()
        self.open.append(Product(acc, granules, compute))
        acc.in_flight += 1

    def _matrix(self, places: np.ndarray, widen) -> np.ndarray:
        data = self.warp.block.shared.data
        pairs = data[places] | data[places + 1].astype(np.uint32) << 8
        return widen(pairs)[..., 0]

    def commit_products(self) -> None:
        if self.together("wgmma_commit"):
            self.groups.append(self.open)
            self.open = []

    def wait_products(self, pending: int) -> None:
        if not self.together("wgmma_wait"):
            return
        shadow = self.warp.block.shadow
        while len(self.groups) > pending:
            for product in self.groups.pop(0):
                if not self.warp.block.early:
                    product.compute()
                product.acc.in_flight -= 1
                shadow.busy[product.granules] -= 1
                shadow.note_read(self.warp.index, int(self.warp.threads[0]), product.granules)

    # ---- registers

    def fence_registers(self) -> None:
        if self.together("wgmma_fence"):
            self.fences += 1
            self.fresh.clear()

    def note(self, written: Any) -> None:
        """An instruction or a local array has these registers from now on."""
        if self.fences:
            for value in written if isinstance(written, tuple) else (written,):
                self.fresh[id(value)] = value

    def _check_registers(self, acc, operands) -> None:
        """No sums or operands touched since the last fence."""
        if not self.fences:
            self.warp.fault("fence", "a product with no wgmma_fence before it")
        elif acc.touched == self.fences or any(id(x) in self.fresh for x in operands):
            what = "sums" if acc.touched == self.fences else "operands"
            self.warp.fault("fence", f"a product's {what} were touched after the last wgmma_fence")

    def set_registers(self, kind: str, count: int) -> None:
        """Give back, or take what others gave back: the launch has no more."""
        machine = self.machine
        if not self.together("setmaxnreg") or self.registers is None:
            return
        more = count - self.registers
        if more < 0 if kind == "inc" else more > 0:
            self.warp.fault("registers", f"setmaxnreg.{kind} to {count} from {self.registers}")
            return
        self.warp.wait_until(lambda: machine.free >= more, f"setmaxnreg.{kind} {count}")
        machine.free -= more
        self.registers = count


def land(machine: Machine) -> bool:
    """Let an awaited copy land, the last that was begun. False if nobody waits for one."""
    for i in reversed(range(len(machine.loads))):
        if any(machine.loads[i].barrier is barrier for barrier in machine.awaited):
            machine.loads.pop(i).move()
            return True
    return False


def unfinished(machine: Machine, warps: list[Warp]) -> Iterator[tuple[str, str]]:
    """What a block that ended left undone: faults, by kind, in words."""
    if machine.loads:
        yield "in flight", f"the block ended with {len(machine.loads)} copies under way"
    sides = [warp.hopper for warp in warps]
    reading = 0
    for side in sides:
        for groups in side.stores.values():
            for store in sum(groups.closed, groups.open):
                reading += store.reads
                side.finish_reading(store)
    if reading:
        yield "in flight", f"the block ended with {reading} stores that still read shared memory"
    if any(side.open or side.groups for side in sides):
        yield "in flight", "the block ended with products under way"
    for first in range(0, len(sides), WARPS):
        steps = [side.steps for side in sides[first : first + WARPS]]
        steps += [Counter()] * (WARPS - len(steps))
        for what in sorted(set().union(*steps)):
            times = [x[what] for x in steps]
            if min(times) < max(times):
                said = f"{what}: the warps of warpgroup {first // WARPS} came {times} times"
                yield "divergence", said


def _operand(desc, length: int, transposed: bool) -> np.ndarray:
    """Places [length, 16] in shared memory of a matrix's elements, 2 bytes each."""
    address, leading, stride = desc
    return _places(int(np.asarray(address).reshape(-1)[0]), leading, stride, length, transposed)


@functools.lru_cache(maxsize=512)
def _places(start: int, leading: int, stride: int, length: int, transposed: bool) -> np.ndarray:
    i, k = np.arange(length)[:, None], np.arange(16)[None]
    if transposed:
        at = start + i // 64 * leading + k // 8 * stride + k % 8 * ROW_BYTES + i % 64 * 2
    else:
        at = start + i // 8 * stride + i % 8 * ROW_BYTES + k * 2
    return swizzled(at) - SHARED_BASE


def _granules(places: np.ndarray) -> np.ndarray:
    return places[:, ::GRANULE].reshape(-1) // GRANULE


def _signed(register: Any) -> int:
    """A coordinate in a 32-bit register."""
    return (int(register) + (1 << 31)) % (1 << 32) - (1 << 31)
