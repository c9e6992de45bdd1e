"""Named machines, and the least time that counted work can take on one.

A time floor is the largest of five times, each a count over a peak rate:

===========  ==================================================================================
``dram``     what must cross DRAM's pins: each tensor once (``dram_floor_bytes``)
``l2``       the counted HBM traffic, which on a GPU is L2-to-SM traffic
``matmul``   matrix FLOPs over the peak of the storage format
``exp``      exponentials over the special-function units' rate
``shared``   bytes through shared memory (``shared_bytes``)
===========  ==================================================================================

DRAM and L2 are kept apart because a program's traffic is not DRAM's: while K and V of a head fit
the L2 cache, DRAM sees each tensor once, however often the tiles are loaded. It is a floor and
no forecast: no rate here is reached in practice, and the terms are taken to overlap fully.

The rates are peaks as their makers print them, in the source that each machine names. A machine
of one's own is a TOML file with the fields of `Device`::

    name = "my card"
    sms = 40
    sram_bytes = 65536
    l2_bytes = 4194304
    dram_bytes_per_s = 320e9
    l2_bytes_per_s = 1.2e12
    shared_bytes_per_s = 8e12
    exp_per_s = 1e12
    registers = true
    source = "where these come from"
    [matmul_flops_per_s]
    float16 = 65e12
    float32 = 8e12
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simattn.counts import Counts
from simattn.dtypes import DTYPES
from simattn.iomodel import predict

INTERMEDIATES = ("S", "P", "m", "l", "O_part", "L_part")


@dataclass(frozen=True, slots=True)
class Device:
    """A machine. Rates are of the whole device, per second; sizes are in bytes."""

    name: str
    sms: int
    sram_bytes: int  # the most that one program (one block) may have
    l2_bytes: int
    dram_bytes_per_s: float
    l2_bytes_per_s: float  # from L2 to the SMs
    shared_bytes_per_s: float
    exp_per_s: float
    matmul_flops_per_s: Mapping[str, float]  # by storage format
    registers: bool  # computed tiles stay in registers, and only loaded ones in shared memory
    source: str


def _nvidia(
    name: str, *, sms: int, clock_hz: float, sram_kib: int, l2_mb: int, dram: float,
    tensor16: float, fp32: float, fp64: float, source: str,
) -> Device:  # fmt: skip
    return Device(
        name=name,
        sms=sms,
        sram_bytes=sram_kib * 1024,
        l2_bytes=l2_mb * 2**20,
        dram_bytes_per_s=dram,
        l2_bytes_per_s=5120 * clock_hz,
        shared_bytes_per_s=sms * 128 * clock_hz,  # 32 banks of 4 bytes a clock in each SM
        exp_per_s=sms * 16 * clock_hz,  # 16 results a clock in each SM
        matmul_flops_per_s=dict(zip(DTYPES, (tensor16, tensor16, fp32, fp64), strict=True)),
        registers=True,
        source=source,
    )


GUIDE = (
    "CUDA C++ Programming Guide, technical specifications and arithmetic throughput by compute "
    "capability (shared memory a block, 32 banks, 16 special-function results a clock an SM)"
)
HOPPER_CLOCK_HZ = 1.83e9  # 989.4e12 / (132 SMs x 4096 FLOPs a clock)
HOPPER_L2 = "L2: A100's 5120 bytes a clock assumed, none is printed for Hopper"

DEVICES: dict[str, Device] = {
    "a100": _nvidia(
        "A100 SXM 40 GB", sms=108, clock_hz=1.41e9, sram_kib=163, l2_mb=40, dram=1.555e12,
        tensor16=312e12, fp32=19.5e12, fp64=19.5e12,
        source="NVIDIA A100 Tensor Core GPU Architecture whitepaper (SMs, 1410 MHz, peaks, 1555 "
        f"GB/s, L2 read 5120 bytes a clock); {GUIDE}",
    ),
    "h100": _nvidia(
        "H100 SXM5 80 GB", sms=132, clock_hz=HOPPER_CLOCK_HZ, sram_kib=227, l2_mb=50, dram=3.35e12,
        tensor16=989.4e12, fp32=66.9e12, fp64=66.9e12,
        source="NVIDIA H100 Tensor Core GPU Architecture whitepaper and data sheet (SMs, peaks, "
        f"3.35 TB/s; the clock is the peak's); {HOPPER_L2}; {GUIDE}",
    ),
    "h200": _nvidia(
        "H200 SXM 141 GB", sms=132, clock_hz=HOPPER_CLOCK_HZ, sram_kib=227, l2_mb=60, dram=4.8e12,
        tensor16=989.4e12, fp32=66.9e12, fp64=66.9e12,
        source="NVIDIA H200 data sheet (4.8 TB/s); L2 size as its driver reports it; the rest as "
        f"H100, whose chip it is; {HOPPER_L2}; {GUIDE}",
    ),
    "classroom": Device(
        name="classroom", sms=1, sram_bytes=4096, l2_bytes=65536, dram_bytes_per_s=1e9,
        l2_bytes_per_s=4e9, shared_bytes_per_s=64e9, exp_per_s=1e9,
        matmul_flops_per_s={"float16": 32e9, "bfloat16": 32e9, "float32": 16e9, "float64": 8e9},
        registers=False, source="made up: round numbers to reckon with by hand",
    ),
}  # fmt: skip


def device(name: str) -> Device:
    """A named device, or one from a TOML file (a name that ends in ``.toml``).

    >>> device("a100").sram_bytes, device("A100").sms
    (166912, 108)
    """
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    if name.endswith(".toml"):
        return _from_file(name)
    known = ", ".join(DEVICES)
    raise ValueError(f"device {name!r}: must be one of {known}, or a file that ends in .toml")


def _from_file(path: str) -> Device:
    given: dict[str, Any]
    try:
        given = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"device {path}: must be readable ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"device {path}: must be TOML ({error})") from None
    given = {"name": Path(path).stem, "registers": True, "source": path, **given}
    fields = set(Device.__slots__)
    if missing := sorted(fields - set(given)):
        raise ValueError(f"device {path}: lacks {', '.join(missing)}")
    if unknown := sorted(set(given) - fields):
        raise ValueError(f"device {path}: {', '.join(unknown)} is not a field of a device")
    for key in ("sms", "sram_bytes", "l2_bytes"):
        if type(given[key]) is not int or given[key] < 1:
            raise ValueError(f"device {path}: {key} {given[key]!r} must be a whole number >= 1")
    for key in ("dram_bytes_per_s", "l2_bytes_per_s", "shared_bytes_per_s", "exp_per_s"):
        given[key] = _rate(path, key, given[key])
    matmul = given["matmul_flops_per_s"]
    if not isinstance(matmul, dict) or not matmul or set(matmul) - set(DTYPES):
        raise ValueError(
            f"device {path}: matmul_flops_per_s must be a table with some of {', '.join(DTYPES)}"
        )
    given["matmul_flops_per_s"] = {
        key: _rate(path, f"matmul_flops_per_s.{key}", rate) for key, rate in matmul.items()
    }
    for key, kind, what in (
        ("name", str, "text"), ("source", str, "text"), ("registers", bool, "true or false"),
    ):  # fmt: skip
        if not isinstance(given[key], kind):
            raise ValueError(f"device {path}: {key} {given[key]!r} must be {what}")
    return Device(**given)


def _rate(path: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"device {path}: {key} {value!r} must be a number above 0")
    if not 0 < value < 1e300:  # an integer too large for a float is not finite either
        raise ValueError(f"device {path}: {key} {value!r} must be a number above 0")
    return float(value)


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time for some work on a device. ``terms_s``: dram, l2, matmul, exp, shared."""

    terms_s: Mapping[str, float]
    dram_bytes: int
    l2_bytes: int
    shared_bytes: int
    matmul_flops: int

    @property
    def binds(self) -> str:
        """The term that takes longest."""
        return max(self.terms_s, key=lambda term: self.terms_s[term])

    @property
    def seconds(self) -> float:
        return max(self.terms_s.values())

    @property
    def flops_per_dram_byte(self) -> float:
        """Arithmetic intensity as rooflines have it, over the least DRAM traffic."""
        return self.matmul_flops / self.dram_bytes if self.dram_bytes else 0.0

    @property
    def flops_per_l2_byte(self) -> float:
        """And over the counted traffic."""
        return self.matmul_flops / self.l2_bytes if self.l2_bytes else 0.0


def floor_of(
    machine: Device, counts: Counts, *, dtype: str, dram_bytes: int, shared_bytes: int
) -> Floor:
    """The floor of counted work whose DRAM and shared-memory bytes are known."""
    if dtype not in machine.matmul_flops_per_s:
        known = ", ".join(machine.matmul_flops_per_s)
        raise ValueError(f"dtype {dtype!r}: {machine.name} states peaks for {known}")
    l2_bytes = counts.traffic.total_bytes
    terms = {
        "dram": dram_bytes / machine.dram_bytes_per_s,
        "l2": l2_bytes / machine.l2_bytes_per_s,
        "matmul": counts.flops.matmul / machine.matmul_flops_per_s[dtype],
        "exp": counts.flops.exp / machine.exp_per_s,
        "shared": shared_bytes / machine.shared_bytes_per_s,
    }
    return Floor(terms, dram_bytes, l2_bytes, shared_bytes, counts.flops.matmul)


def time_floor(machine: Device, variant: str, *, dtype: str = "float16", **shape: Any) -> Floor:
    """The least time that a variant can take on a device. ``shape``: as in `simattn.predict`.

    >>> f = time_floor(DEVICES["h100"], "q_outer", n=4096, d=128, heads=16, block_q=128,
    ...                block_k=128)
    >>> f.binds, round(f.seconds * 1e6)
    ('matmul', 139)
    """
    counts = predict(variant, dtype=dtype, **shape)
    return floor_of(
        machine,
        counts,
        dtype=dtype,
        dram_bytes=dram_floor_bytes(machine, counts, dtype=dtype, **shape),
        shared_bytes=shared_bytes(machine, variant, counts, dtype=dtype, **shape),
    )


ROWS = tuple(rows << k for k in range(20) for rows in (16, 24) if rows << k != 24)


@dataclass(frozen=True, slots=True)
class Placed:
    """A variant's least floor on a device, and the tiles that have it."""

    block_q: int
    block_k: int
    floor: Floor


def least_floor(
    machine: Device, variant: str, *, n: int, block_q: int | None = None,
    block_k: int | None = None, **shape: Any,
) -> Placed | None:  # fmt: skip
    """The floor at the tiles, of 16, 32, 48, 64, 96, 128, ... rows, for which it is least.

    Of equal floors the one that moves fewer bytes, then the larger tile. A size given is kept.
    None where nothing fits the device's SRAM.
    """
    s = n if shape.get("n_k") is None else shape["n_k"]
    found: tuple[tuple[float, int, int], Placed] | None = None
    for Br in [block_q] if block_q else _rows_up_to(n):
        for Bc in [block_k] if block_k else _rows_up_to(s):
            blocks: dict[str, Any] = {"block_q": Br, "block_k": Bc}
            if predict(variant, n=n, **blocks, **shape).peak_sram_bytes > machine.sram_bytes:
                continue
            floor = time_floor(machine, variant, n=n, **blocks, **shape)
            rank = floor.seconds, floor.l2_bytes, -Br * Bc
            if found is None or rank < found[0]:
                found = rank, Placed(Br, Bc, floor)
    return found[1] if found else None


def _rows_up_to(length: int) -> list[int]:
    """The sizes below ``length``, and all of it."""
    return [*(rows for rows in ROWS if rows < length), max(length, 1)]


def dram_floor_bytes(
    machine: Device, counts: Counts, *, n: int, d: int, n_k: int | None = None,
    dv: int | None = None, heads: int = 1, kv_heads: int | None = None, batch: int = 1,
    dtype: str = "float16", **_: Any,
) -> int:  # fmt: skip
    """Bytes that DRAM moves at the least: inputs once, outputs once, and of an intermediate tensor
    (S, P, m, l, split partials) what does not fit the L2 cache, out and in again."""
    s, e = n if n_k is None else n_k, d if dv is None else dv
    w, a = DTYPES[dtype].width_bytes, DTYPES[dtype].accumulator.width_bytes
    kv = batch * (heads if kv_heads is None else kv_heads)
    reads, writes = counts.traffic.read_bytes, counts.traffic.write_bytes
    inputs = {"Q": batch * heads * n * d * w, "K": kv * s * d * w, "V": kv * s * e * w}
    outputs = {"O": batch * heads * n * e * w, "L": batch * heads * n * a}
    once = sum(min(size, reads.get(name, 0)) for name, size in inputs.items())
    once += sum(min(size, writes.get(name, 0)) for name, size in outputs.items())
    for name in INTERMEDIATES:
        size = writes.get(name, 0)
        if name in ("m", "l"):  # written over and over
            size = min(size, batch * heads * n * a)
        once += 2 * max(0, size - machine.l2_bytes)
    return once


def shared_bytes(
    machine: Device, variant: str, counts: Counts, *, dtype: str = "float16", **shape: Any
) -> int:
    """Bytes through shared memory. Without registers, all SRAM traffic. With them, loaded tiles
    alone: written once, and read by each operation that takes them as loaded."""
    if not machine.registers:
        return counts.sram.read_bytes + counts.sram.write_bytes
    half = predict(variant, dtype="float16", **shape).sram  # where loaded tiles are the narrow ones
    as_loaded = (4 * half.read_elems - half.read_bytes) // 2
    return as_loaded * DTYPES[dtype].width_bytes + counts.traffic.total_read_bytes
