"""Who may see what: happens-before by vector clocks.

Every thread has a clock, which ticks whenever it passes on what it did: at a barrier, a
``syncwarp``, an arrival. ``known[t, u]`` is the last tick of u of which t has heard. An access is
stamped with its thread and that thread's tick, and comes before another thread's access only if
that thread has heard of the stamp. Two accesses to one place, one of them a write, of which neither
comes before the other, are a race, in whatever order they happened to run.

Columns beyond the threads are asynchronous units: one for each mbarrier, whose copies a thread has
heard of once it waited for the barrier's phase. What threads wrote, asynchronous units see only if
the writer fenced it since, and the thread that sets the unit to work has heard of that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

import numpy as np

GRANULE = 2  # bytes that share a stamp: the smallest element
UNITS = 64  # asynchronous units a block may use
NOBODY = -1
READ, WRITE, ATOMIC = range(3)
AGAINST = {READ: (WRITE, ATOMIC), WRITE: (READ, WRITE, ATOMIC), ATOMIC: (READ, WRITE)}
NEVER = np.iinfo(np.int32).max  # a stamp of which nobody has heard


class Clocks:
    """What each thread of a block has heard of the others."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.known = np.zeros((threads + 1, threads + UNITS), np.int32)  # a last row for nobody
        own = np.arange(threads)
        self.known[own, own] = 1
        self.fences: defaultdict[tuple[str, int], list[int]] = defaultdict(list)  # a thread's ticks

    def now(self, threads: np.ndarray) -> np.ndarray:
        """The stamp of what these threads do now."""
        return self.known[threads, threads]

    def release(self, threads: np.ndarray) -> np.ndarray:
        """All that these threads have heard or done, to pass on; what they do next is not in it."""
        heard = self.known[threads].max(axis=0)
        self.known[threads, threads] += 1
        return heard

    def acquire(self, threads: np.ndarray, heard: np.ndarray) -> None:
        self.known[threads] = np.maximum(self.known[threads], heard)

    def have_heard(self, threads: np.ndarray, told: np.ndarray) -> bool:
        """Whether these threads know all of it."""
        return not (self.known[threads] < told).any()

    def exchange(self, threads: np.ndarray) -> None:
        """These threads meet: each hears what all have heard."""
        self.acquire(threads, self.release(threads))

    def fence(self, threads: np.ndarray, *kinds: str) -> None:
        """What these threads wrote is ready for asynchronous units."""
        for thread in threads:
            for kind in kinds:
                self.fences[kind, int(thread)].append(int(self.known[thread, thread]))
        self.known[threads, threads] += 1

    def fenced(self, reader: int, writer: np.ndarray, written: np.ndarray, kind: str) -> bool:
        """Whether every thread among the writers has fenced since, as far as ``reader`` knows."""
        threads = (writer != NOBODY) & (writer < self.threads)
        writer, written = writer[threads], written[threads]
        for thread in np.unique(writer) if writer.size else ():
            ticks = self.fences[kind, int(thread)]
            heard = bisect_left(ticks, self.known[reader, thread])  # of the first so many
            if not heard or ticks[heard - 1] < written[writer == thread].max():
                return False
        return True


class Shadow:
    """The last write to each granule, and the last read since by each warp."""

    def __init__(self, size: int, warps: int, clocks: Clocks) -> None:
        granules = -(-size // GRANULE)
        self.clocks = clocks
        self.writer = np.full(granules, NOBODY, np.int32)
        self.written = np.zeros(granules, np.int32)
        self.reader = np.zeros((warps, granules), np.int32)
        self.seen = np.zeros((warps, granules), np.int32)  # 0: no read since the write
        self.flying = np.zeros(granules, bool)  # an asynchronous write is under way
        self.busy = np.zeros(granules, np.int16)  # asynchronous reads that are

    def read(self, warp: int, threads: np.ndarray, at: np.ndarray) -> str | None:
        """Threads [n] read granules [n, k]; what is wrong with that."""
        known = self.clocks.known
        writer = self.writer[at]
        wrong = None
        if self.flying[at].any():
            wrong = "in flight"
        elif (writer == NOBODY).any():
            wrong = "uninitialised"
        elif (known[threads[:, None], writer] < self.written[at]).any():
            wrong = "race"
        self.reader[warp, at] = threads[:, None]
        self.seen[warp, at] = self.clocks.now(threads)[:, None]
        return wrong

    def read_asynchronously(self, warp: int, thread: int, at: np.ndarray) -> str | None:
        """A unit that a thread sets to work begins to read granules [k]; what is wrong."""
        wrong = self.read(warp, np.array([thread]), at[None])
        fenced = self.clocks.fenced(thread, self.writer[at], self.written[at], "writes")
        return wrong or (None if fenced else "fence")

    def note_read(self, warp: int, thread: int, at: np.ndarray) -> None:
        """The unit is done, and its thread knows."""
        self.reader[warp, at] = thread
        self.seen[warp, at] = self.clocks.known[thread, thread]

    def write(self, threads: np.ndarray, at: np.ndarray) -> str | None:
        """Threads [n] write granules [n, k]."""
        now = self.clocks.now(threads)[:, None]
        wrong = self.may_write(threads, at)
        self.writer[at], self.written[at], self.seen[:, at] = threads[:, None], now, 0
        if wrong is None and (self.writer[at] != threads[:, None]).any():
            wrong = "race"  # two lanes of one instruction
        return wrong

    def may_write(self, threads: np.ndarray, at: np.ndarray) -> str | None:
        known = self.clocks.known
        writer, readers = self.writer[at], self.reader[:, at]
        if self.flying[at].any() or self.busy[at].any():
            return "in flight"
        unheard = (known[threads[:, None], writer] < self.written[at]) & (writer != NOBODY)
        if unheard.any() or (known[threads[:, None], readers] < self.seen[:, at]).any():
            return "race"
        return None

    def take_off(self, threads: np.ndarray, at: np.ndarray) -> str | None:
        """An asynchronous write begins."""
        wrong = self.may_write(threads, at)
        self.flying[at] = True
        return wrong

    def land(self, threads: np.ndarray, at: np.ndarray) -> None:
        """It is done, and its threads know."""
        self.flying[at] = False
        self.writer[at], self.seen[:, at] = threads[:, None], 0
        self.written[at] = self.clocks.now(threads)[:, None]


class Order:
    """The last read, write and atomic of each byte of global memory, by any block of a launch."""

    def __init__(self, size: int) -> None:
        self.block = np.zeros((3, size), np.int32)  # its number + 1; 0: nobody
        self.thread = np.zeros((3, size), np.int32)
        self.when = np.zeros((3, size), np.int32)

    def touch(
        self, block: int, clocks: Clocks, threads: np.ndarray, at: np.ndarray, kind: int
    ) -> bool:
        """Threads [n] of a block touch bytes [n, k]; true if it is a race."""
        unordered = False
        for other in AGAINST[kind]:
            who = self.block[other, at]
            if who.any():
                heard = clocks.known[threads[:, None], self.thread[other, at]]
                mine = (who == block + 1) & (heard >= self.when[other, at])
                unordered |= bool(((who > 0) & ~mine).any())
        self.block[kind, at], self.thread[kind, at] = block + 1, threads[:, None]
        self.when[kind, at] = clocks.now(threads)[:, None]
        if kind == WRITE and (self.thread[kind, at] != threads[:, None]).any():
            unordered = True  # two lanes of one instruction
        return unordered

    def unsettle(self, at: np.ndarray) -> None:
        """These writes are asynchronous, and under way."""
        self.when[WRITE, at] = NEVER

    def settle(self, clocks: Clocks, thread: int, at: np.ndarray) -> None:
        """They are done, and their thread knows."""
        self.when[WRITE, at] = clocks.known[thread, thread]
