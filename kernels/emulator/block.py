"""A block: its warps take turns, one at a time, on one Python thread each.

A warp runs until it must wait. `Order` remembers who touched global memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from .barriers import Barrier
from .flow import LANES
from .hopper import Machine, land
from .memory import GlobalMemory, SharedMemory
from .races import Clocks, Shadow
from .report import Report


class AbandonedError(Exception):
    """Raised in a warp's thread to end it."""


class Order:
    """Who last wrote and read each element of global memory: threads of one launch."""

    def __init__(self, size: int) -> None:
        self.block = np.full((2, size), -1, np.int32)  # of the last reader and writer of a byte
        self.thread = np.zeros((2, size), np.int32)
        self.when = np.zeros((2, size), np.int32)

    def touch(self, block: Block, threads: np.ndarray, place: np.ndarray, size: int, writes: bool):
        """Record an access to bytes place .. place + size - 1 a thread; true if it is a race."""
        at = place[:, None] + np.arange(size)
        number, known = block.number, block.clocks.known
        unordered = False
        for kind in (0, 1) if writes else (1,):  # reads race with writes only
            who = self.block[kind, at]
            mine = (who == number) & (
                known[threads[:, None], self.thread[kind, at]] >= self.when[kind, at]
            )
            unordered |= bool(((who >= 0) & ~mine).any())
        kind = int(writes)
        self.block[kind, at], self.thread[kind, at] = number, threads[:, None]
        self.when[kind, at] = block.clocks.now(threads)[:, None]
        if writes and (self.thread[kind, at] != threads[:, None]).any():
            unordered = True  # two lanes of one instruction
        return unordered


class Block:
    """One block of a launch, while it runs."""

    def __init__(
        self,
        index: tuple[int, int, int],
        number: int,
        threads: int,
        memory: GlobalMemory,
        order: Order,
        shared_bytes: int,
        report: Report,
        files: set[str],
        *,
        early: bool,
        backwards: bool,
    ) -> None:
        self.index, self.number, self.memory, self.report = index, number, memory, report
        self.files, self.early, self.backwards = files, early, backwards
        self.global_order = order
        self.warps_count = -(-threads // LANES)
        self.clocks = Clocks(self.warps_count * LANES)
        self.shared = SharedMemory(shared_bytes, report)
        self.shadow = Shadow(shared_bytes, self.warps_count, self.clocks)
        self.everyone = Barrier(self.warps_count * LANES)
        self.named: dict[int, Barrier] = {}
        self.machine = Machine()
        self._turn_over = threading.Semaphore(0)
        self._turns: dict[int, threading.Semaphore] = {}
        self._finished: set[int] = set()
        self._abandoned = False
        self._error: BaseException | None = None

    def place_of(self, address: int) -> str:
        """A global address in words."""
        return self.memory.describe(address)

    def run(self, warps: list[Any], kernels: list[Callable[[], None]]) -> None:
        """Run each warp's kernel to its end, or until none can go on."""
        threads = []
        for warp, kernel in zip(warps, kernels, strict=True):
            self._turns[warp.index] = threading.Semaphore(0)
            body = threading.Thread(target=self._live, args=(warp, kernel), daemon=True)
            body.start()
            threads.append(body)
        order = warps[::-1] if self.backwards else warps
        stuck = False
        while len(self._finished) < len(warps) and self._error is None and not stuck:
            able = [
                warp
                for warp in order
                if warp.index not in self._finished and (warp.ready is None or warp.ready())
            ]
            for warp in able:
                self._give_turn(warp)
            stuck = not able and not self.unstick()
        if stuck:
            self._deadlock(warps)
        self._abandoned = True
        for warp in warps:
            if warp.index not in self._finished:
                self._give_turn(warp)
        for body in threads:
            body.join()
        if self._error is not None:
            raise self._error
        if self.machine.loads and not stuck:
            said = f"the block ended with {len(self.machine.loads)} copies under way"
            self.report.add_fault("in flight", 0, said, self.index, 0)
        for number, barrier in self.named.items():
            if barrier.come and not stuck:
                said = f"barrier {number} is left with {barrier.come} of {barrier.expected} threads"
                self.report.add_fault("barrier", 0, said, self.index, 0)

    def unstick(self) -> bool:
        """Where no warp can go on, let asynchronous work happen. False if there is none."""
        return land(self.machine)

    def switch(self, warp: Any) -> None:
        """From a warp's thread: end its turn; returns when the next begins."""
        self._turn_over.release()
        self._turns[warp.index].acquire()
        if self._abandoned:
            raise AbandonedError

    def _give_turn(self, warp: Any) -> None:
        self._turns[warp.index].release()
        self._turn_over.acquire()

    def _live(self, warp: Any, kernel: Callable[[], None]) -> None:
        self._turns[warp.index].acquire()
        try:
            if not self._abandoned:
                with np.errstate(all="ignore"):  # NaN and infinity are legitimate in a kernel
                    kernel()
        except AbandonedError:
            pass
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._finished.add(warp.index)
            self._turn_over.release()

    def _deadlock(self, warps: list[Any]) -> None:
        waiting = [warp for warp in warps if warp.index not in self._finished]
        said = "; ".join(f"warp {warp.index} at {warp.waits_for}" for warp in waiting)
        ended = len(warps) - len(waiting)
        said += f"; {ended} warps have ended" if ended else ""
        line = int(waiting[0].waits_for.rpartition(" ")[2])
        self.report.add_fault("deadlock", line, said, self.index, waiting[0].index)
