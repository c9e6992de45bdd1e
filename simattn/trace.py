"""A run, tile by tile: every load, store, computation and free, in order, with what it moved.

The recorder is an SRAM whose tiles write down what is done to them; the loops and the counters are
those of every other run, and a run that isn't recorded pays nothing for it. Two forms come out:

``chrome``  Chrome's trace JSON, which Perfetto and chrome://tracing open: lanes for HBM reads, HBM
            writes and compute, counters of live SRAM bytes and of HBM bytes so far.
``player``  one HTML file that needs nothing else: the matrices, SRAM, m and l, step by step, two
            loop orders side by side.

Durations are counts over one SM's share of a device's peak rates, one event after another: a
picture of the order of things, not a measurement.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np

from simattn.counts import Counts
from simattn.device import Device
from simattn.dtypes import DTYPES, Array, DType
from simattn.iomodel import predict
from simattn.masks import TileGrid
from simattn.memory import HBM, SRAM, Region, Tile
from simattn.variants import nest

CHROME_LIMIT = 200_000  # events; Perfetto stays quick, and the file under 100 MB
PLAYER_LIMIT = 20_000

Place = tuple[str, tuple[tuple[int, int], ...]]  # a tensor, and first and last + 1 on each axis


class TraceTooLong(ValueError):
    """More events than can be drawn. The message names the limit and how to stay below it."""


@dataclass(slots=True)
class Event:
    """One thing that happened, and where the counters stood after it."""

    kind: str  # load, store, compute, make (a tile of one value) or free
    text: str
    at: Place | None  # the part of a tensor that it concerns
    hbm_bytes: int  # moved by this event
    read_bytes: int  # from HBM so far
    write_bytes: int
    live_bytes: int  # in SRAM after it
    peak_bytes: int  # in SRAM during it
    matmul: int  # of this event
    nonmatmul: int
    exp: int
    sram_bytes: int
    added: list[tuple[int, str, int]] = field(default_factory=list)  # tiles: number, name, bytes
    removed: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    named: tuple[int, str] | None = None  # what a tile is called from now on
    m: tuple[int, list[float]] | None = None  # first row, and values from there on
    l: tuple[int, list[float]] | None = None


class RecordedTile(Tile):
    """A tile that tells its SRAM what is done to it."""

    __slots__ = ("at", "label", "number")

    def __init__(self, sram: SRAM, array: Array, width_bytes: int, name: str) -> None:
        super().__init__(sram, array, width_bytes, name)
        self.at: Place | None = None
        self.label = "S" if name == "QK" else name
        self.number = -1  # of a view of another tile

    @property
    def T(self) -> Tile:
        view = super().T
        assert isinstance(view, RecordedTile)
        view.at, view.label, view.number = self.at, self.label, self.number
        return view

    def rows(self) -> tuple[int, int] | None:
        """The rows it belongs to; a partial result has its part before them."""
        if self.at is None:
            return None
        name, ends = self.at
        return ends[1] if name.endswith("_part") else ends[0]


class RecordingSRAM(SRAM):
    """An SRAM that keeps a list of `Event`s."""

    tile = RecordedTile

    def __init__(self, dtype: DType, capacity_bytes: int | None, hbm: HBM, limit: int) -> None:
        super().__init__(dtype, capacity_bytes)
        self.hbm, self.limit = hbm, limit
        self.events: list[Event] = []
        self.hbm_bytes = {"load": 0, "store": 0}
        self.made = self.peak_during = 0
        self.added: list[tuple[int, str, int]] = []
        self.removed: list[int] = []
        self.inside = False  # an operation that is being recorded

    def load(self, region: Region) -> Tile:
        before = self.begin()
        tile = super().load(region)
        assert isinstance(tile, RecordedTile)
        tile.at = self.place_of(region)
        self.end("load", f"load {spelt(tile.at)}", tile, (), before, region)
        return tile

    def store(self, region: Region, tile: Tile) -> None:
        before = self.begin()
        super().store(region, tile)
        assert isinstance(tile, RecordedTile)
        tile.at = self.place_of(region)
        self.end("store", f"store {spelt(tile.at)}", tile, (tile,), before, region)

    def full(self, shape: tuple[int, ...], value: float, name: str) -> Tile:
        before = self.begin()
        tile = super().full(shape, value, name)
        text = f"{name} = {'-∞' if value == -math.inf else format(value, 'g')}"
        self.end("make", text, tile, (), before)
        return tile

    def free(self, *tiles: Tile) -> None:
        for tile in tiles:
            assert isinstance(tile, RecordedTile)
            self.removed.append(tile.number)
        names = ", ".join(t.label for t in tiles if isinstance(t, RecordedTile))
        super().free(*tiles)
        if not self.inside:
            self.end("free", f"free {names}", None, (), self.tally())

    def _admit(self, tile: Tile) -> Tile:
        super()._admit(tile)
        assert isinstance(tile, RecordedTile)
        tile.number, self.made = self.made, self.made + 1
        self.added.append((tile.number, tile.label, tile.nbytes))
        self.peak_during = max(self.peak_during, self.live_bytes)
        return tile

    # Writing down

    def tally(self) -> tuple[int, int, int, int]:
        t = self.ledger
        return t.matmul, t.nonmatmul, t.exp, t.sram_read_bytes + t.sram_write_bytes

    def begin(self) -> tuple[int, int, int, int]:
        self.inside = True
        return self.tally()

    def end(
        self,
        kind: str,
        text: str,
        result: Tile | None,
        operands: Sequence[Any],
        before: tuple[int, int, int, int],
        region: Region | None = None,
    ) -> None:
        self.inside = False
        if len(self.events) >= self.limit:
            raise too_long(self.limit)
        moved = 0
        if region is not None:
            moved = math.prod(region.shape) * region.dtype.width_bytes
            self.hbm_bytes[kind] += moved
        matmul, nonmatmul, exp, sram = (
            now - then for now, then in zip(self.tally(), before, strict=True)
        )
        event = Event(
            kind, text, result.at if isinstance(result, RecordedTile) else None, moved,
            self.hbm_bytes["load"], self.hbm_bytes["store"], self.live_bytes,
            max(self.peak_during, self.live_bytes), matmul, nonmatmul, exp, sram,
            self.added, self.removed, [t.number for t in operands if isinstance(t, RecordedTile)],
        )  # fmt: skip
        if isinstance(result, RecordedTile) and kind != "free":
            event.named = result.number, result.label
            self.note_statistics(event, result)
        self.events.append(event)
        self.added, self.removed, self.peak_during = [], [], 0

    def note_statistics(self, event: Event, result: RecordedTile) -> None:
        rows = result.rows()
        if result.label in ("m", "l") and rows and len(result.shape) == 1:
            values = [float(x) for x in result._array]
            setattr(event, result.label, (rows[0], values))

    def place_of(self, region: Region) -> Place:
        """Where a region lies in its tensor, by its address."""
        part = region._data
        for base in vars(self.hbm).values():
            whole = base._data
            if base.name != region.name or not np.may_share_memory(part, whole) or not part.size:
                continue
            offset = part.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
            start = np.unravel_index(offset // whole.itemsize, whole.shape)
            sizes = (1,) * (whole.ndim - part.ndim) + part.shape
            ends = tuple((int(i), int(i) + size) for i, size in zip(start, sizes, strict=True))
            return region.name, ends
        return region.name, tuple((0, size) for size in region.shape)


def spelt(place: Place) -> str:
    """A region as Python would slice it.

    >>> spelt(("K", ((4, 8), (0, 2))))
    'K[4:8, 0:2]'
    """
    name, ends = place
    return f"{name}[{', '.join(f'{start}:{stop}' for start, stop in ends)}]"


def too_long(limit: int) -> TraceTooLong:
    return TraceTooLong(
        f"trace: more than {limit} events, too many to draw; take fewer rows (--n, --n-k) or "
        "larger tiles (--block-q, --block-k)"
    )


# What each tile operation says of itself, once done: (text, label of the result, its place)

Told = tuple[str, str, Place | None]


def _matmul(self: RecordedTile, other: RecordedTile) -> Told:
    at = None
    if self.at and other.at:
        at = ("S", (self.at[1][0], other.at[1][0]))
    return f"S = {self.label} {other.label}ᵀ", "S", at


def _accumulate(self: RecordedTile, P: RecordedTile, V: RecordedTile, *_: Any) -> Told:
    rows = P.rows()
    at: Place | None = ("O", (rows, (0, self.shape[1]))) if rows else self.at
    return f"O += {P.label} {V.label}", "O", at


def _rowmax(self: RecordedTile, m: RecordedTile) -> Told:
    rows = self.rows()
    return "m = max(m, rowmax S)", "m", ("m", (rows,)) if rows else m.at


def _maximum(self: RecordedTile, other: RecordedTile) -> Told:
    rows = self.rows() or other.rows()
    return "m = max(m, m of the part)", "m", ("m", (rows,)) if rows else None


def _add_rowsum(self: RecordedTile, P: RecordedTile) -> Told:
    rows = P.rows()
    return f"l += rowsum {P.label}", "l", ("l", (rows,)) if rows else self.at


def _scale(self: RecordedTile, *_: Any) -> Told:
    return f"{self.label} * scale", self.label, self.at


def _shift(self: RecordedTile, m: RecordedTile) -> Told:
    if len(self.shape) == 1:
        return "m old - m new", "c", m.at
    return f"{self.label} - m", self.label, self.at


def _exp(self: RecordedTile) -> Told:
    if len(self.shape) == 1:
        return "c = exp(m old - m new)", "c", self.at
    return "P = exp(S - m)", "P", self.at


def _log(self: RecordedTile) -> Told:
    return f"log {self.label}", "L", self.at


def _iadd(self: RecordedTile, other: RecordedTile) -> Told:
    return f"{self.label} + {other.label}", self.label, self.at


def _imul(self: RecordedTile, c: RecordedTile) -> Told:
    rows, at = c.rows(), self.at
    if rows and self.label in ("l", "O"):  # a state that was merged into lies where its parts do
        at = (self.label, (rows, *((0, width) for width in self.shape[1:])))
    return f"{self.label} * {c.label}", self.label, at


def _itruediv(self: RecordedTile, l: RecordedTile) -> Told:
    return f"{self.label} / l", self.label, self.at


def _recorded(name: str, tell: Callable[..., Told]) -> Callable[..., Any]:
    plain = getattr(Tile, name)

    def operation(self: RecordedTile, *operands: Any) -> Any:
        sram = self._sram
        assert isinstance(sram, RecordingSRAM)
        before = sram.begin()
        text, label, at = tell(self, *operands)
        done = plain(self, *operands)
        result = self if done is None else done
        result.label, result.at = label, at
        sram.end("compute", text, result, (self, *operands), before)
        return done

    return operation


TELLS: dict[str, Callable[..., Told]] = {
    "__matmul__": _matmul, "accumulate": _accumulate, "rowmax": _rowmax, "maximum": _maximum,
    "add_rowsum": _add_rowsum, "scale": _scale, "shift": _shift, "exp": _exp, "log": _log,
    "__iadd__": _iadd, "__imul__": _imul, "__itruediv__": _itruediv,
}  # fmt: skip
for _name, _tell in TELLS.items():
    setattr(RecordedTile, _name, _recorded(_name, _tell))


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded run of one head."""

    variant: str
    n: int
    s: int
    d: int
    e: int
    block_q: int
    block_k: int
    dtype: str
    sram_bytes: int | None
    events: list[Event] = field(repr=False)
    out: Array = field(repr=False)
    counts: Counts
    predicted: Counts = field(repr=False)


def record(
    variant: str,
    q: Array,
    k: Array,
    v: Array,
    *,
    block_q: int,
    block_k: int,
    dtype: str = "float32",
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    sram_bytes: int | None = None,
    splits: int | None = None,
    limit: int = CHROME_LIMIT,
) -> Trace:
    """Run one head, q [n, d], k [s, d] and v [s, e], and keep every event.

    Raises `TraceTooLong` past ``limit`` events, `simattn.SRAMCapacityError` where the tiles don't
    fit ``sram_bytes``.

    >>> x = np.ones((4, 2))
    >>> t = record("q_outer", x, x, x, block_q=2, block_k=4)
    >>> [event.text for event in t.events[:4]]
    ['load Q[0:2, 0:2]', 'm = -∞', 'l = 0', 'O = 0']
    """
    storage = DTYPES[dtype]
    (n, d), (s, e) = q.shape, v.shape
    block_q, block_k = min(block_q, max(n, 1)), min(block_k, max(s, 1))
    left, right = window_size
    shape: dict[str, Any] = {
        "n": n, "n_k": s, "d": d, "dv": e, "block_q": block_q, "block_k": block_k, "dtype": dtype,
        "is_causal": is_causal, "window_size": window_size, "splits": splits,
    }  # fmt: skip
    predicted = predict(variant, **shape)
    if predicted.flops.matmul // (2 * (d + e) * block_q * block_k) > limit:
        raise too_long(limit)  # a tile pair is several events
    hbm = HBM()
    out = np.empty((n, e), storage.holder)
    for name, array in (("Q", q), ("K", k), ("V", v)):
        hbm.place(name, np.ascontiguousarray(storage.round(array)), storage)
    hbm.place("O", out, storage)
    sram = RecordingSRAM(storage, sram_bytes, hbm, limit)
    loops, _ = nest(variant, splits, s, block_k)
    grid = TileGrid(n, s, block_q, block_k, (left, 0 if is_causal else right))
    with np.errstate(all="ignore"):
        loops(hbm, sram, grid, scale=1 / math.sqrt(d), lse=False)
    return Trace(
        variant, n, s, d, e, block_q, block_k, dtype, sram_bytes, sram.events, out,
        sram.ledger.counts(), predicted,
    )  # fmt: skip


# Chrome's trace format

LANES = {"load": 1, "store": 2, "compute": 3, "make": 3}
LANE_NAMES = {1: "HBM reads", 2: "HBM writes", 3: "compute"}


def duration_s(event: Event, machine: Device, dtype: str) -> float:
    """Counts of one event over one SM's share of the peak rates."""
    if event.hbm_bytes:
        return event.hbm_bytes / (machine.l2_bytes_per_s / machine.sms)
    return machine.sms * max(
        event.matmul / machine.matmul_flops_per_s[dtype],
        event.exp / machine.exp_per_s,
        event.sram_bytes / machine.shared_bytes_per_s,
    )


def chrome(traces: Sequence[Trace], machine: Device) -> str:
    """The traces as Chrome trace JSON, a process each. Times are in microseconds."""
    events: list[dict[str, Any]] = []
    for pid, trace in enumerate(traces, 1):
        events += _chrome_events(trace, machine, pid)
    about = (
        f"durations: counts over one SM's share of the peak rates of {machine.name}, one event "
        "after another; not a measurement"
    )
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"note": about}}
    )


def _chrome_events(trace: Trace, machine: Device, pid: int) -> Iterator[dict[str, Any]]:
    title = f"{trace.variant}, tiles {trace.block_q} x {trace.block_k}"
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": title}}
    for tid, name in LANE_NAMES.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    now = 0.0
    for event in trace.events:
        took = 1e6 * duration_s(event, machine, trace.dtype)
        counter = {"ph": "C", "pid": pid, "tid": 0}
        live = {"name": "SRAM bytes live", "args": {"bytes": event.peak_bytes}}
        yield {**counter, "ts": now, **live}
        if event.kind in LANES:
            yield {
                "ph": "X", "name": event.text, "cat": event.kind, "pid": pid,
                "tid": LANES[event.kind], "ts": now, "dur": took,
                "args": {
                    "HBM bytes": event.hbm_bytes, "matmul FLOPs": event.matmul,
                    "exp": event.exp, "SRAM bytes": event.sram_bytes,
                },
            }  # fmt: skip
        now += took
        if event.live_bytes != event.peak_bytes:
            yield {**counter, "ts": now, "name": "SRAM bytes live",
                   "args": {"bytes": event.live_bytes}}  # fmt: skip
        if event.hbm_bytes:
            so_far = {"read": event.read_bytes, "written": event.write_bytes}
            yield {**counter, "ts": now, "name": "HBM bytes so far", "args": so_far}


# The player


def player(traces: Sequence[Trace]) -> str:
    """The traces, side by side, as one HTML file that loads nothing else."""
    data = json.dumps([_player_run(trace) for trace in traces], separators=(",", ":"))
    template = files("simattn").joinpath("player.html").read_text(encoding="utf-8")
    return template.replace('"DATA"', data.replace("</", "<\\/"), 1)


def _player_run(trace: Trace) -> dict[str, Any]:
    traffic = trace.counts.traffic
    return {
        "variant": trace.variant, "n": trace.n, "s": trace.s, "d": trace.d, "e": trace.e,
        "Br": trace.block_q, "Bc": trace.block_k, "dtype": trace.dtype,
        "capacity": trace.sram_bytes, "peak": trace.counts.peak_sram_bytes,
        "reads": traffic.total_read_bytes, "writes": traffic.total_write_bytes,
        "events": [_player_event(event) for event in trace.events],
    }  # fmt: skip


def _player_event(event: Event) -> dict[str, Any]:
    kept: dict[str, Any] = {
        "k": event.kind, "t": event.text, "r": event.read_bytes, "w": event.write_bytes,
        "b": event.live_bytes, "p": event.peak_bytes, "f": event.matmul,
    }  # fmt: skip
    if event.at:
        kept["at"] = [event.at[0], [list(ends) for ends in event.at[1]]]
    for key, value in (("add", event.added), ("del", event.removed), ("use", event.used)):
        if value:
            kept[key] = value
    if event.named:
        kept["is"] = event.named
    for key, statistic in (("m", event.m), ("l", event.l)):
        if statistic:
            first, values = statistic
            kept[key] = [first, [short(x) for x in values]]
    return kept


def short(x: float) -> str:
    """Three figures, for a cell of the picture."""
    if math.isinf(x):
        return "-∞" if x < 0 else "∞"
    return f"{x:.2f}" if abs(x) < 100 else f"{x:.3g}"
