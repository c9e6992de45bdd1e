"""Barriers of a block: who has come, who waits, and what they tell each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Barrier:
    """A barrier that opens when as many threads have come as it expects, then starts again.

    ``opened`` counts how often it has opened; ``heard`` is what those who came have to tell (see
    `races`), ``told`` the same for those who came to the last opening.
    """

    expected: int
    come: int = 0
    opened: int = 0
    heard: np.ndarray | None = None
    told: np.ndarray | None = None

    def arrive(self, threads: int, heard: np.ndarray) -> bool:
        """Threads come. False if that is more than expected."""
        self.come += threads
        self.heard = heard if self.heard is None else np.maximum(self.heard, heard)
        self._turn()
        return self.come <= self.expected

    def leave(self, threads: int) -> None:
        """Threads have ended, and are expected no more."""
        self.expected -= threads
        self._turn()

    def _turn(self) -> None:
        if self.come == self.expected > 0:
            self.opened += 1
            self.come, self.heard, self.told = 0, None, self.heard
