"""A warp as instructions see it: 32 lanes that load, store, copy and wait under a mask.

The references in `kernels.ptx` are written against this class. Whatever an instruction does wrong
goes to the report, with the kernel's line, and the emulation goes on as well as it can.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np

from .barriers import Barrier
from .copies import Copy, CopyGroups
from .flow import LANES, Flow
from .hopper import Hopper
from .memory import SHARED_BASE
from .races import ATOMIC, GRANULE, READ, WRITE
from .report import NOWHERE, Line

if TYPE_CHECKING:
    from .block import Block

LANE = np.arange(LANES)
SAID = {
    "in flight": "touches {} that an asynchronous copy or product still uses: wait for it first",
    "uninitialised": "reads {} that nobody has written",
    "race": "touches {} that another thread touched, with no barrier between",
    "fence": "lets a unit read {} that threads wrote, with no fence_async of theirs after",
}


class Warp:
    """One warp of a block."""

    def __init__(self, block: Block, index: int, flow: Flow) -> None:
        self.block, self.index, self.flow = block, index, flow
        self.threads = index * LANES + LANE
        self.copies: CopyGroups[Copy] = CopyGroups()
        self.hopper = Hopper(self, block.machine)
        self.report = block.report
        self.ready: Callable[[], bool] | None = None  # what it waits for
        self.waits_for, self.waits_at = "", NOWHERE

    # ---- faults

    def line(self) -> Line:
        """The kernel's line that is running."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in self.block.files:
            frame = frame.f_back
        return NOWHERE if frame is None else (frame.f_code.co_filename, frame.f_lineno)

    def fault(self, kind: str, detail: str) -> None:
        self.report.add_fault(kind, self.line(), detail, self.block.index, self.index)

    def together(self, what: str) -> bool:
        """Every lane must take part; a warp-wide instruction says so first."""
        if self.flow.full:
            return True
        self.fault("divergence", f"{what} with {int(self.flow.mask.sum())} of {LANES} lanes")
        return False

    def active(self) -> np.ndarray:
        return LANE if self.flow.full else np.flatnonzero(self.flow.mask)

    # ---- global memory

    def load_global(self, address: np.ndarray, size: int) -> np.ndarray:
        """Bytes [32, size]; 0xFF for lanes that are inactive or refused."""
        lanes = self.active()
        data = np.full((LANES, size), 0xFF, np.uint8)
        lanes, at = self._global(lanes, address[lanes], size, READ)
        data[lanes] = self.block.memory.data[at]
        return data

    def store_global(self, address: np.ndarray, data: np.ndarray) -> None:
        size = data.shape[1]
        lanes = self.active()
        lanes, at = self._global(lanes, address[lanes], size, WRITE)
        self.block.memory.data[at] = data[lanes]

    def add_global(self, address: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Add to 32-bit words, a lane after another; returns what each lane found."""
        lanes = self.active()
        found = np.full(LANES, 0xFFFFFFFF, np.uint32)
        data = self.block.memory.data
        for lane, at in zip(*self._global(lanes, address[lanes], 4, ATOMIC), strict=True):
            word = data[at].view(np.uint32)
            found[lane] = word[0]
            data[at] = (word + x[lane : lane + 1].astype(np.uint32)).view(np.uint8)
        return found

    def _global(self, lanes, address, size, kind: int):
        """Check and count an access; returns the lanes that may go on, and their bytes' places."""
        memory = self.block.memory
        sizes = np.full(lanes.shape, size)
        fine = self._aligned(address, size, "global")
        place, row = memory.locate(address, sizes)
        if (fine & (row < 0)).any():
            wrong = int(address[fine & (row < 0)][0])
            self.fault("bounds", f"{size} bytes at {self.block.place_of(wrong)}")
        fine &= row >= 0
        lanes, address, place, row = lanes[fine], address[fine], place[fine], row[fine]
        at = place[:, None] + np.arange(size)
        if lanes.size:
            for writes in (False, True) if kind == ATOMIC else (kind == WRITE,):
                memory.count(address, sizes[fine], row, writes)
            block, threads = self.block, self.threads[lanes]
            if block.global_order.touch(block.number, block.clocks, threads, at, kind):
                self.say("race", f"elements of {memory.names[memory.tensor[row[0]]]}")
        return lanes, at

    def _aligned(self, address, size: int, where: str) -> np.ndarray:
        fine = address % size == 0
        if not fine.all():
            wrong = int(address[~fine][0])
            at = self.block.place_of(wrong) if where == "global" else f"shared address {wrong}"
            self.fault("alignment", f"{size} bytes at {at}, no multiple of {size}")
        return fine

    # ---- shared memory

    def load_shared(self, address: np.ndarray, size: int) -> np.ndarray:
        """Bytes [32, size]."""
        lanes = self.active()
        data = np.full((LANES, size), 0xFF, np.uint8)
        lanes, granules = self._shared(lanes, address[lanes], size, writes=False)
        if lanes.size:
            self.say(self.block.shadow.read(self.index, self.threads[lanes], granules))
            place = (address[lanes] - SHARED_BASE)[:, None] + np.arange(size)
            data[lanes] = self.block.shared.data[place]
        return data

    def store_shared(self, address: np.ndarray, data: np.ndarray) -> None:
        size = data.shape[1]
        lanes = self.active()
        lanes, granules = self._shared(lanes, address[lanes], size, writes=True)
        if lanes.size:
            self.say(self.block.shadow.write(self.threads[lanes], granules))
            place = (address[lanes] - SHARED_BASE)[:, None] + np.arange(size)
            self.block.shared.data[place] = data[lanes]

    def _shared(self, lanes, address, size: int, *, writes: bool):
        """Check and count an access; returns the lanes that may go on, and their granules."""
        fine = self._aligned(address, size, "shared")
        inside = self.block.shared.inside(address, size)
        if not inside.all():
            wrong = int(address[~inside][0]) - SHARED_BASE
            self.fault("bounds", f"{size} bytes at {wrong} of {self.block.shared.data.size} shared")
        fine &= inside
        lanes, address = lanes[fine], address[fine]
        if lanes.size:
            conflicts = self.block.shared.count(lanes, address, size, writes)
            if conflicts:
                self.report.conflict_lines[self.line()] += conflicts
        return lanes, _granules(address, size)

    def say(self, wrong: str | None, what: str = "shared memory") -> None:
        if wrong:
            self.fault(wrong, SAID[wrong].format(what))

    # ---- asynchronous copies

    def copy_async(self, shared, address, size, width: int) -> None:
        """Begin a copy of ``size`` of ``width`` bytes a lane."""
        lanes = self.active()
        lanes, granules = self._shared(lanes, shared[lanes], width, writes=True)
        size = np.minimum(size, width)
        reads = lanes[size[lanes] > 0]
        place = np.zeros(LANES, np.int64)
        for part in np.unique(size[reads]):
            some = reads[size[reads] == part]
            self._aligned(address[some], width, "global")
            kept, at = self._global(some, address[some], int(part), READ)
            refused = np.setdiff1d(some, kept)
            size = np.where(np.isin(LANE, refused), 0, size)
            place[kept] = at[:, 0]
        if not lanes.size:
            return
        self.say(self.block.shadow.take_off(self.threads[lanes], granules))
        copy = Copy(self.threads[lanes], shared[lanes], granules, place[lanes], size[lanes], width)
        self.copies.open.append(copy)
        if self.block.early:
            self._move(copy)

    def commit_copies(self) -> None:
        if self.together("cp_async_commit"):
            self.copies.commit()

    def wait_copies(self, pending: int) -> None:
        if not self.together("cp_async_wait"):
            return
        for copy in self.copies.due(pending):
            if not copy.done:
                self._move(copy)
            self.block.shadow.land(copy.threads, copy.granules)

    def _move(self, copy: Copy) -> None:
        data = np.zeros((copy.threads.size, copy.width), np.uint8)
        column = np.arange(copy.width)
        wanted = column < copy.size[:, None]
        source = copy.place[:, None] + column
        data[wanted] = self.block.memory.data[source[wanted]]
        self.block.shared.data[(copy.shared - SHARED_BASE)[:, None] + column] = data
        copy.done = True

    # ---- waiting

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Let other warps run until ``ready``."""
        while not ready():  # again after a turn: another warp may have been faster
            self.ready, self.waits_for, self.waits_at = ready, what, self.line()
            self.block.switch(self)
            self.ready = None

    def syncthreads(self) -> None:
        """All of the block meet."""
        self.together("syncthreads")
        self._meet(self.block.everyone, self.threads, "syncthreads", waits=True)

    def syncwarp(self) -> None:
        """All lanes meet, and see what the others wrote."""
        if self.together("syncwarp"):
            self.block.clocks.exchange(self.threads)

    def named_barrier(self, number, threads, *, waits: bool) -> None:
        """A barrier of some of the block's warps."""
        what = "bar_sync" if waits else "bar_arrive"
        self.together(what)
        number, count = int(number[0]), int(threads[0])
        if not 0 < number < 16 or count % LANES or not count:
            self.fault("barrier", f"{what} {number} for {count} threads")
            return
        barrier = self.block.named.setdefault(number, Barrier(count))
        if barrier.come and barrier.expected != count:
            said = f"{barrier.expected} and {count} threads expected at barrier {number}"
            self.fault("barrier", said)
        barrier.expected = count
        self._meet(barrier, self.threads, f"{what} {number}", waits=waits)

    def _meet(self, barrier: Barrier, threads, what: str, *, waits: bool) -> None:
        clocks = self.block.clocks
        opened = barrier.opened
        if barrier.told is not None and not clocks.have_heard(threads, barrier.told):
            said = f"{what}: may count for the opening before, as no barrier has told of all in it"
            self.fault("race", said)
        if not barrier.arrive(threads.size, clocks.release(threads)):
            self.fault("barrier", f"{what}: {barrier.come} came, {barrier.expected} expected")
        if waits:
            self.wait_until(lambda: barrier.opened > opened, what)
            assert barrier.told is not None
            clocks.acquire(threads, barrier.told)


def _granules(address: np.ndarray, size: int) -> np.ndarray:
    first = (address - SHARED_BASE) // GRANULE
    return first[:, None] + np.arange(max(1, size // GRANULE))
