"""What an emulated launch reports: faults, traffic, bank conflicts, instructions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from textwrap import fill

FAULTS = {
    "bounds": "an address outside every tensor, or outside the block's shared memory",
    "alignment": "an address that is no multiple of the access's size",
    "uninitialised": "shared memory read before anything was written there",
    "race": "two accesses, one a write, that no barrier orders",
    "in flight": "memory touched while an asynchronous copy or product may still use it",
    "divergence": "a warp-wide or block-wide instruction without all of its lanes",
    "deadlock": "warps that wait for what never comes",
    "barrier": "a barrier used against its rules",
}


class KernelFaultError(RuntimeError):
    """A kernel did what it must not; the message lists the faults."""


@dataclass(slots=True)
class Fault:
    """One kind of fault at one line of the kernel."""

    kind: str  # a key of FAULTS
    line: int  # in the kernel's file; 0 if at no line
    detail: str  # of the first time
    block: tuple[int, int, int]
    warp: int
    count: int = 1

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        where = f"(block {self.block}, warp {self.warp}{times})"
        return f"line {self.line}: {self.kind}: {self.detail} {where}"


@dataclass(slots=True)
class TensorTraffic:
    """Global memory traffic of one tensor, in bytes that lanes asked for and in 32-byte sectors."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_sectors: int = 0
    write_sectors: int = 0


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
    conflict_lines: Counter[int] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    blocks: int = 0
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
        self, kind: str, line: int, detail: str, block: tuple[int, int, int], warp: int
    ) -> None:
        assert kind in FAULTS
        for known in self.faults:
            if known.kind == kind and known.line == line:
                known.count += 1
                return
        self.faults.append(Fault(kind, line, detail, block, warp))

    def __str__(self) -> str:
        lines = [f"{self.blocks} blocks, {self.shared_bytes} bytes of shared memory each"]
        lines.append(
            f"{'tensor':<12}{'read bytes':>14}{'sectors':>10}{'write bytes':>14}{'sectors':>10}"
        )
        for name, x in self.tensors.items():
            lines.append(
                f"{name:<12}{x.read_bytes:>14}{x.read_sectors:>10}"
                f"{x.write_bytes:>14}{x.write_sectors:>10}"
            )
        x = self.shared
        lines.append(f"{'shared':<12}{x.read_bytes:>14}{'':>10}{x.write_bytes:>14}")
        lines.append(
            f"wavefronts  {x.read_wavefronts} read, {x.write_wavefronts} written; "
            f"{x.conflicts} of them from bank conflicts"
        )
        for line, conflicts in sorted(self.conflict_lines.items()):
            lines.append(f"  line {line}: {conflicts} conflicts")
        counts = sorted(self.instructions.items())
        lines.append("instructions  " + ", ".join(f"{name} {count}" for name, count in counts))
        lines += [str(fault) for fault in self.faults] or ["no faults"]
        return "\n".join(fill(line, 96, subsequent_indent="    ") for line in lines)
