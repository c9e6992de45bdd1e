"""What a run counts: plain data that the simulator fills, closed forms predict and reports print.

Every number is a Python integer, so that a count and its prediction are compared with ``==``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Traffic:
    """HBM traffic per tensor (``Q K V S P O m l L O_part L_part``); absent is a tensor at rest."""

    reads: Mapping[str, int]  # elements
    writes: Mapping[str, int]  # elements
    read_bytes: Mapping[str, int]
    write_bytes: Mapping[str, int]

    @property
    def total_read_elems(self) -> int:
        return sum(self.reads.values())

    @property
    def total_write_elems(self) -> int:
        return sum(self.writes.values())

    @property
    def total_elems(self) -> int:
        return self.total_read_elems + self.total_write_elems

    @property
    def total_read_bytes(self) -> int:
        return sum(self.read_bytes.values())

    @property
    def total_write_bytes(self) -> int:
        return sum(self.write_bytes.values())

    @property
    def total_bytes(self) -> int:
        return self.total_read_bytes + self.total_write_bytes


@dataclass(frozen=True, slots=True)
class SRAMTraffic:
    """What tile operations, loads and stores read from and write to SRAM."""

    read_elems: int
    write_elems: int
    read_bytes: int
    write_bytes: int


@dataclass(frozen=True, slots=True)
class Flops:
    """Arithmetic: ``matmul`` counts 2 a multiply-add; ``exp`` is not part of ``nonmatmul``."""

    matmul: int
    nonmatmul: int
    exp: int


@dataclass(frozen=True, slots=True)
class Counts:
    """One run's ledger, or its prediction.

    ``peak_sram_bytes`` is the largest program's; everything else is a total over programs.
    """

    traffic: Traffic
    sram: SRAMTraffic
    flops: Flops
    peak_sram_bytes: int


def differences(counted: Counts, predicted: Counts) -> list[str]:
    """Every number in which the two differ, as ``reads Q: counted 8192, predicted 8193``."""
    a, b = dict(_flat("", asdict(counted))), dict(_flat("", asdict(predicted)))
    return [
        f"{name}: counted {a.get(name, 0)}, predicted {b.get(name, 0)}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name, 0) != b.get(name, 0)
    ]


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name} ", value)
        else:
            yield prefix + name, value
