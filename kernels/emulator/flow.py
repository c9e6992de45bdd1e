"""Which lanes of a warp are active: the words that `source` rewrites a kernel's branches into.

Lanes that part at a branch meet again after it, as on hardware that reconverges. A scalar condition
is every lane's, and costs a Python ``if``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LANES = 32
ENDLESS = 1 << 16  # turns of a loop: half a minute at most


class _Unset:
    """What a variable holds before its first assignment."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<unset>"


@dataclass(slots=True)
class Loop:
    depth: int
    mask: np.ndarray  # active where the loop began
    left: np.ndarray = field(default_factory=lambda: np.zeros(LANES, bool))
    skipped: np.ndarray = field(default_factory=lambda: np.zeros(LANES, bool))
    turns: int = 0


@dataclass(slots=True)
class Frame:
    depth: int
    mask: np.ndarray
    left: np.ndarray = field(default_factory=lambda: np.zeros(LANES, bool))
    value: Any = None


class Flow:
    """The mask of active lanes, the branches around it, and the lanes that wait for their end."""

    unset = _Unset()

    def __init__(self, exists: np.ndarray) -> None:
        self.mask = exists  # active lanes
        self.full = bool(exists.all())
        self.away = ~exists  # lanes that left a loop or function which is still running
        self.branches: list[tuple[np.ndarray, Any]] = []

    def _become(self, mask: np.ndarray) -> bool:
        """Make these lanes active, less those away. True if there is one."""
        self.mask = mask & ~self.away
        self.full = bool(self.mask.all())
        return self.full or bool(self.mask.any())

    def _leave(self, lanes: np.ndarray) -> None:
        self.away = self.away | lanes
        self._become(np.zeros(LANES, bool))

    # ---- if

    def enter(self, test: Any) -> bool:
        """Begin an ``if``: true if some lane goes in, and then only those lanes are active."""
        self.branches.append((self.mask, test))
        if not isinstance(test, np.ndarray):
            return bool(test) and (self.full or bool(self.mask.any()))
        return self._become(self.mask & (test != 0))

    def otherwise(self) -> bool:
        """The ``else`` of the branch that was entered last."""
        mask, test = self.branches[-1]
        if not isinstance(test, np.ndarray):
            return not test and (self.full or bool(self.mask.any()))
        return self._become(mask & (test == 0))

    def leave(self) -> None:
        mask, _ = self.branches.pop()
        if mask is not self.mask:
            self._become(mask)

    # ---- loops

    def loop(self) -> Loop:
        return Loop(len(self.branches), self.mask)

    def again(self, loop: Loop) -> bool:
        """The next turn: lanes that skipped the rest of the last one are back."""
        loop.turns += 1
        if loop.turns > ENDLESS:
            raise RuntimeError(
                f"kernel: a loop turned {ENDLESS} times; a warp that spins keeps its turn, and "
                "what it waits for never comes"
            )
        del self.branches[loop.depth :]
        if loop.skipped.any():
            self.away = self.away & ~loop.skipped
            loop.skipped = np.zeros(LANES, bool)
        return self._become(loop.mask)

    def keep(self, loop: Loop, test: Any) -> bool:
        """A ``while``'s condition: lanes where it fails leave the loop."""
        if not isinstance(test, np.ndarray):
            return bool(test)
        loop.left |= self.mask & (test == 0)
        self.away = self.away | loop.left
        return self._become(loop.mask)

    def stop(self, loop: Loop) -> bool:
        """``break``: true if no lane is left in the loop."""
        loop.left |= self.mask
        self._leave(self.mask)
        return not (loop.mask & ~self.away).any() and not loop.skipped.any()

    def skip(self, loop: Loop) -> bool:
        """``continue``: true if no lane is left in this turn."""
        loop.skipped |= self.mask
        self._leave(self.mask)
        return not (loop.mask & ~self.away).any()

    def end(self, loop: Loop) -> None:
        del self.branches[loop.depth :]
        self.away = self.away & ~(loop.left | loop.skipped)
        self._become(loop.mask)

    def each(self, items: Iterable[Any]) -> Iterable[Any]:
        """The items of a ``for`` that no lane leaves early."""
        if not isinstance(items, LaneRange):
            return items
        loop = self.loop()
        return self._each(loop, items)

    def _each(self, loop: Loop, items: Iterable[Any]) -> Iterator[Any]:
        yield from self.iterate(loop, items)
        self.end(loop)

    def iterate(self, loop: Loop, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            if not self.again(loop):
                return
            if isinstance(items, LaneRange) and not self.keep(loop, items.holds(item)):
                return
            yield item

    def range(self, *bounds: Any) -> Any:
        """``range``; where bounds differ between lanes, one that ends lane by lane."""
        plain = [self._scalar(bound) for bound in bounds]
        if all(bound is not None for bound in plain):
            return range(*plain)
        start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
        return LaneRange(start, stop, step)

    def _scalar(self, bound: Any) -> int | None:
        """The bound as an int, if the active lanes agree."""
        if not isinstance(bound, np.ndarray):
            return int(bound)
        active = bound[self.mask]
        return int(active[0]) if active.size and (active == active[0]).all() else None

    # ---- functions

    def call(self) -> Frame:
        return Frame(len(self.branches), self.mask)

    def give(self, frame: Frame, value: Any) -> bool:
        """``return``: true if no lane is left in the function."""
        frame.value = value if self.full else self.put(value, frame.value)
        frame.left |= self.mask
        self._leave(self.mask)
        return not (frame.mask & ~frame.left).any()

    def finish(self, frame: Frame) -> Any:
        del self.branches[frame.depth :]
        if frame.left.any():
            self.away = self.away & ~frame.left
            self._become(frame.mask)
        return frame.value

    # ---- values

    def put(self, new: Any, old: Any) -> Any:
        """``new`` in the active lanes, ``old`` in the others."""
        if self.full or old is self.unset or old is None or new is old:
            return new
        if isinstance(new, tuple) and isinstance(old, tuple):
            return tuple(self.put(x, y) for x, y in zip(new, old, strict=True))
        if not isinstance(new, np.ndarray | int | float | np.generic):
            return new
        return np.where(self.mask, new, old)

    def both(self, first: Any, second: Callable[[], Any]) -> Any:
        if not isinstance(first, np.ndarray):
            return first and second()
        return (first != 0) & np.not_equal(second(), 0)

    def either(self, first: Any, second: Callable[[], Any]) -> Any:
        if not isinstance(first, np.ndarray):
            return first or second()
        return (first != 0) | np.not_equal(second(), 0)

    def negate(self, value: Any) -> Any:
        return value == 0 if isinstance(value, np.ndarray) else not value

    def choose(self, test: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        if not isinstance(test, np.ndarray):
            return yes() if test else no()
        return np.where(test, yes(), no())


@dataclass(frozen=True, slots=True)
class LaneRange:
    """A range whose bounds differ between the lanes."""

    start: Any
    stop: Any
    step: Any

    def __iter__(self) -> Iterator[Any]:
        value = self.start + np.zeros(LANES, np.int64)
        while True:
            yield value
            value = value + self.step

    def holds(self, value: np.ndarray) -> np.ndarray:
        return np.where(np.greater(self.step, 0), value < self.stop, value > self.stop)
