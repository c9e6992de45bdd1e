"""Asynchronous copies of a warp (cp.async): groups, and when they are done.

A copy may be done as soon as it begins or as late as its group is awaited, and a kernel must be
right either way. ``early`` and ``late`` emulate the two; late groups land last copy first. Between
begin and wait the bytes are *in flight*: whoever touches them is at fault, even where the values
happen to be right. After the wait they are the waiting lanes' writes, which the others may read
after a barrier.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(slots=True)
class Copy:
    """One instruction's copies, a lane each."""

    threads: np.ndarray
    shared: np.ndarray  # addresses
    granules: np.ndarray  # [lanes, bytes / GRANULE], of the shared memory's shadow
    place: np.ndarray  # of the source, in global memory's data
    size: np.ndarray  # bytes to copy, the rest of ``width`` becomes 0
    width: int
    done: bool = False


@dataclass(slots=True)
class CopyGroups(Generic[T]):
    """Copies since the last commit, and the closed groups, oldest first."""

    open: list[T] = field(default_factory=list)
    closed: list[list[T]] = field(default_factory=list)

    def commit(self) -> None:
        self.closed.append(self.open)
        self.open = []

    def due(self, pending: int, *, keep: bool = False) -> list[T]:
        """The copies that must be done so that ``pending`` groups are left, the last first."""
        count = max(0, len(self.closed) - pending)
        due = [copy for group in self.closed[:count] for copy in group]
        if not keep:
            del self.closed[:count]
        return due[::-1]
