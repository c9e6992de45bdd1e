"""A block: its warps take turns, one at a time, on one Python thread each.

A warp runs until it must wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from .barriers import Barrier
from .flow import LANES
from .hopper import Machine, land, unfinished
from .memory import GlobalMemory, SharedMemory
from .races import Clocks, Order, Shadow
from .report import NOWHERE, Report, place


class AbandonedError(Exception):
    """Raised in a warp's thread to end it."""


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
        registers: int | None,
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
        self.machine = Machine(registers)
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
        if stuck:
            return
        for kind, said in unfinished(self.machine, warps):
            self.report.add_fault(kind, NOWHERE, said, self.index, 0)
        for number, barrier in self.named.items():
            if barrier.come:
                said = f"barrier {number} is left with {barrier.come} of {barrier.expected} threads"
                self.report.add_fault("barrier", NOWHERE, said, self.index, 0)

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
                self.everyone.leave(LANES)
        except AbandonedError:
            pass
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._finished.add(warp.index)
            self._turn_over.release()

    def _deadlock(self, warps: list[Any]) -> None:
        waiting = [warp for warp in warps if warp.index not in self._finished]
        said = "; ".join(
            f"warp {warp.index} at {warp.waits_for}, {place(warp.waits_at)}" for warp in waiting
        )
        ended = len(warps) - len(waiting)
        said += f"; {ended} of {len(warps)} warps have ended" if ended else ""
        first = waiting[0]
        self.report.add_fault("deadlock", first.waits_at, said, self.index, first.index)
