"""What an emulated launch reports: faults, traffic, bank conflicts, instructions."""

from __future__ import annotations

import linecache
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill

FAULTS = {
    "bounds": "an address outside every tensor, or outside the block's shared memory",
    "alignment": "an address that is no multiple of the access's size",
    "uninitialised": "shared memory read before anything was written there",
    "race": "two accesses, one a write, that no barrier orders",
    "in flight": "memory touched while an asynchronous copy or product may still use it",
    "fence": "what threads wrote or touched is used by a unit beside them, with no fence between",
    "divergence": "a warp-wide or block-wide instruction without all of its lanes",
    "deadlock": "warps that wait for what never comes",
    "barrier": "a barrier used against its rules",
    "registers": "registers given back or taken against the rules",
}


SECTOR_BYTES = 32
NOWHERE = ("", 0)
Line = tuple[str, int]  # of a kernel: file and number; NOWHERE if at none


class KernelFaultError(RuntimeError):
    """A kernel did what it must not; the message lists the faults."""


@dataclass(slots=True)
class Fault:
    """One kind of fault at one line of the kernel."""

    kind: str  # a key of FAULTS
    file: str
    line: int  # 0 if at no line
    detail: str  # of the first time
    block: tuple[int, int, int]
    warp: int
    count: int = 1

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        at = f"{place((self.file, self.line))}: " if self.line else ""
        return f"{at}{self.kind}: {self.detail} (block {self.block}, warp {self.warp}{times})"


def place(line: Line) -> str:
    """A line in words."""
    return f"{Path(line[0]).name}, line {line[1]}"


@dataclass(slots=True)
class TensorTraffic:
    """Global memory traffic of one tensor, in bytes that lanes asked for and in 32-byte sectors."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_sectors: int = 0
    write_sectors: int = 0

    def columns(self) -> str:
        """Bytes, sectors, and how much of the sectors that is; read, then written."""
        parts = ((self.read_bytes, self.read_sectors), (self.write_bytes, self.write_sectors))
        return "".join(
            f"{moved:>14}{sectors:>10}{moved / (sectors * SECTOR_BYTES) if sectors else 0:>6.0%}"
            if moved or sectors else f"{'-':>14}{'':>16}"
            for moved, sectors in parts
        )  # fmt: skip


@dataclass(slots=True)
class SharedTraffic:
    """Shared memory: a wavefront is one pass over the 32 banks, a conflict one pass too many."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_wavefronts: int = 0
    write_wavefronts: int = 0
    conflicts: int = 0


@dataclass(slots=True)
class Report:
    """The profile of one launch."""

    tensors: dict[str, TensorTraffic] = field(default_factory=dict)
    shared: SharedTraffic = field(default_factory=SharedTraffic)
    instructions: Counter[str] = field(default_factory=Counter)  # a warp's instruction counts once
    conflict_lines: Counter[Line] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    blocks: int = 0
    threads: int = 0  # of a block
    shared_bytes: int = 0  # of a block
    seconds: float = 0.0  # of emulation

    @property
    def ok(self) -> bool:
        return not self.faults

    def kinds(self) -> set[str]:
        """The kinds of fault that were found."""
        return {fault.kind for fault in self.faults}

    def check(self) -> Report:
        """The report itself; raises KernelFaultError if it holds a fault."""
        if self.faults:
            raise KernelFaultError("\n".join(map(str, self.faults)))
        return self

    def add_fault(
        self, kind: str, at: Line, detail: str, block: tuple[int, int, int], warp: int
    ) -> None:
        assert kind in FAULTS
        for known in self.faults:
            if (known.kind, known.file, known.line) == (kind, *at):
                known.count += 1
                return
        self.faults.append(Fault(kind, *at, detail, block, warp))

    def __str__(self) -> str:
        columns = f"{'bytes':>14}{'sectors':>10}{'used':>6}"
        lines = [
            f"{_count(self.blocks, 'block')} of {self.threads} threads, "
            f"{self.shared_bytes} bytes of shared memory each",
            f"{'':<12}{'global read':^30}{'global written':^30}".rstrip(),
            f"{'tensor':<12}{columns}{columns}",
        ]
        lines += [f"{name:<12}{x.columns()}".rstrip() for name, x in self.tensors.items()]
        shared = self.shared
        lines.append(
            f"shared memory: {shared.read_bytes} bytes read, {shared.write_bytes} written; "
            f"wavefronts: {shared.read_wavefronts} and {shared.write_wavefronts}, "
            f"{shared.conflicts} of them from bank conflicts"
        )
        for line, conflicts in sorted(self.conflict_lines.items()):
            code = linecache.getline(*line).strip()
            lines.append(f"  {place(line)}: {_count(conflicts, 'conflict')}: {code}")
        counts = sorted(self.instructions.items())
        lines.append("instructions: " + ", ".join(f"{name} {count}" for name, count in counts))
        lines += [str(fault) for fault in self.faults] or ["no faults"]
        return "\n".join(
            fill(line, 96, subsequent_indent="    ", drop_whitespace=len(line) > 96)
            for line in lines
        )


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
