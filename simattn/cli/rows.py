"""Rows of a report: a variant and its tiles, what came of them, and what people see of that."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simattn import run, tiling
from simattn.cli.problem import Problem
from simattn.counts import Counts, differences
from simattn.dtypes import Array
from simattn.iomodel import predict
from simattn.memory import SRAMCapacityError
from simattn.report import Column, Report, Row
from simattn.variants import VARIANTS, nest

UNTILED_PAIRS = 2**18  # batch x heads x n x n_k: each is some 50 microseconds of Python
TILED_ELEMS = 2**31  # of the inputs; and of S and P of one head, where they are stored

# Cases: what a row is about, before anything is run


@dataclass(frozen=True, slots=True)
class Case:
    """A variant and its tiles.

    ``predicted`` is None where they don't fit the SRAM; ``smallest_sram_bytes`` then says what
    would. Tiles are None where even the smallest don't fit.
    """

    variant: str
    tiling: str  # "tiled" or "untiled"
    block_q: int | None
    block_k: int | None
    splits: int | None
    predicted: Counts | None
    smallest_sram_bytes: int | None = None


def tiled_case(problem: Problem, variant: str, args: argparse.Namespace) -> Case:
    shape = problem.shape
    try:
        blocks = run.choose_blocks(variant, args.block_q, args.block_k, args.sram, **shape)
    except SRAMCapacityError:
        least = tiling.smallest_budget(variant, block_q=args.block_q, block_k=args.block_k, **shape)
        return Case(variant, "tiled", args.block_q, args.block_k, None, None, least)
    return fitted(problem, variant, "tiled", *blocks, args.sram)


def fitted(
    problem: Problem, variant: str, how: str, block_q: int, block_k: int, sram: int | None
) -> Case:
    predicted = predict(variant, block_q=block_q, block_k=block_k, **problem.shape)
    _, splits = nest(variant, problem.splits, problem.n_k, block_k)
    need = predicted.peak_sram_bytes
    if sram is not None and need > sram:
        return Case(variant, how, block_q, block_k, splits, None, need)
    return Case(variant, how, block_q, block_k, splits, predicted)


def is_run(problem: Problem, case: Case) -> bool:
    """Whether the case is small enough to be run, and not only predicted."""
    pairs = problem.n * problem.n_k
    if case.tiling == "untiled" and problem.batch * problem.heads * pairs > UNTILED_PAIRS:
        return False
    matrices = 2 * pairs if VARIANTS[case.variant].stores_scores else 0
    return case.predicted is not None and max(problem.input_elems, matrices) <= TILED_ELEMS


# Rows: a case and what came of it, as flat fields

COUNTS: dict[str, Callable[[Counts], Any]] = {
    "hbm_read_elems": lambda c: c.traffic.total_read_elems,
    "hbm_write_elems": lambda c: c.traffic.total_write_elems,
    "hbm_read_bytes": lambda c: c.traffic.total_read_bytes,
    "hbm_write_bytes": lambda c: c.traffic.total_write_bytes,
    "peak_sram_bytes": lambda c: c.peak_sram_bytes,
    "sram_read_elems": lambda c: c.sram.read_elems,
    "sram_write_elems": lambda c: c.sram.write_elems,
    "matmul_flops": lambda c: c.flops.matmul,
    "nonmatmul_flops": lambda c: c.flops.nonmatmul,
    "exp_count": lambda c: c.flops.exp,
    "reads": lambda c: dict(c.traffic.reads),
    "writes": lambda c: dict(c.traffic.writes),
}


def predicted_name(name: str) -> str:
    return "predicted_" + name.removeprefix("hbm_")


def predicted_fields(counts: Counts | None) -> dict[str, Any]:
    return {predicted_name(name): counts and value(counts) for name, value in COUNTS.items()}


def row_of(case: Case, done: run.Run | None = None, **accuracy: Any) -> dict[str, Any]:
    """All fields; counts and accuracy are None where the case was not run."""
    return {
        "variant": case.variant,
        "tiling": case.tiling,
        "block_q": case.block_q,
        "block_k": case.block_k,
        "splits": case.splits,
        "counted": done is not None,
        **{name: done and value(done.counts) for name, value in COUNTS.items()},
        **predicted_fields(case.predicted),
        "as_predicted": done and done.counts == case.predicted,
        "differences": done and case.predicted and differences(done.counts, case.predicted),
        "max_abs_error": None,
        "tolerance": None,
        "max_abs_lse_error": None,
        "lse_tolerance": None,
        "flagged": None,  # why the row is exempt from its tolerance
        **accuracy,
        "fits": case.predicted is not None,
        "smallest_sram_bytes": case.smallest_sram_bytes,
    }


def largest_difference(got: Array, want: Array) -> float:
    """Equal infinities don't differ, nor do two NaNs; a NaN on one side is a difference of NaN."""
    with np.errstate(all="ignore"):
        difference = np.abs(got.astype(np.float64) - want)
    difference[(got == want) | (np.isnan(got) & np.isnan(want))] = 0
    return float(difference.max(initial=0))


def faults(row: Row) -> list[str]:
    """What makes the exit code 1."""
    found = []
    if row["as_predicted"] is False:
        found.append(f"counts differ from the closed form ({'; '.join(row['differences'])})")
    for what in ("", "lse_"):
        error, limit = row[f"max_abs_{what}error"], row[f"{what}tolerance"]
        if error is not None and row["flagged"] is None and not error <= limit:
            found.append(f"{what}error {error:.3g} is above {limit:.3g}")
    return found


def rank(rows: Iterable[dict[str, Any]]) -> None:
    """Give each row its bytes over the fewest of any row."""
    totals = [(row, total_bytes(row)) for row in rows]
    best = min((total for _, total in totals if total is not None), default=0)
    for row, total in totals:
        row["total_vs_best"] = None if total is None else total / best if best else 1.0


def judged(
    rows: Sequence[Row],
    columns: Sequence[Column],
    above: Sequence[str],
    below: Sequence[str],
    budget: str,
) -> Report:
    """The report, its exit code, and the line that explains it."""
    wrong = [f"{row['variant']} {row['tiling']}: {fault}" for row in rows for fault in faults(row)]
    if wrong:
        return Report(rows, columns, above, below, 1, "; ".join(wrong))
    if not any(row["fits"] for row in rows):
        least = min(rows, key=lambda row: int(row["smallest_sram_bytes"]))
        failure = (
            f"{budget}: fits no variant, must be at least {least['smallest_sram_bytes']} bytes "
            f"({least['variant']} {least['tiling']})"
        )
        return Report(rows, columns, above, below, 2, failure)
    return Report(rows, columns, above, below)


# What people see of a row


def shown(name: str) -> Callable[[Row], Any]:
    """A count: as counted, else as predicted."""
    return lambda row: row[predicted_name(name)] if row.get(name) is None else row[name]


def total_bytes(row: Row) -> int | None:
    read, written = shown("hbm_read_bytes")(row), shown("hbm_write_bytes")(row)
    return None if read is None else int(read + written)


def note(row: Row) -> str:
    if not row["fits"]:
        return f"does not fit: needs {row['smallest_sram_bytes']:,} bytes of SRAM"
    return "; ".join(faults(row)) or row["flagged"] or ("" if row["counted"] else "predicted")


def field_of(name: str) -> Callable[[Row], Any]:
    return lambda row: row[name]


def ratio(name: str) -> Callable[[Row], Any]:
    return lambda row: None if row[name] is None else f"{row[name]:,.2f}"


def variant_name(row: Row) -> str:
    return f"{row['variant']} p={row['splits']}" if row["splits"] else str(row["variant"])


def tile_sizes(row: Row) -> str | None:
    return row["block_q"] and row["block_k"] and f"{row['block_q']} x {row['block_k']}"


VARIANT = Column("variant", variant_name, left=True)
TILES = Column("tiles", tile_sizes)
HBM = (
    Column("HBM reads", shown("hbm_read_elems")),
    Column("HBM writes", shown("hbm_write_elems")),
    Column("HBM bytes", total_bytes),
)
X_BEST = Column("x best", ratio("total_vs_best"))
PEAK = Column("peak SRAM", shown("peak_sram_bytes"))
WORK = (
    Column("matmul FLOPs", shown("matmul_flops")),
    Column("other FLOPs", shown("nonmatmul_flops")),
    Column("exp", shown("exp_count")),
)
ERROR = Column("max error", field_of("max_abs_error"))
NOTE = Column("note", note, left=True)
FIT = Column("note", lambda row: "" if row["fits"] else note(row), left=True)
TRAFFIC_LEGEND = (
    "HBM reads and writes: elements that programs load into their SRAM and store from it, summed",
    "over batch and heads; HBM bytes: both. Peak SRAM: bytes, of the largest program. On a GPU",
    "this is traffic between L2 and the SMs: DRAM sees each tensor once where K and V fit L2.",
)
ERROR_LEGEND = "Max error: largest distance to untiled float64 attention on the inputs as stored."
PREDICTED_LEGEND = (
    "predicted: not run, numbers from the closed form (untiled runs up to 2^18 pairs of rows,",
    "tiled up to 2^31 elements of input, or of S and P where they are stored).",
)


def sram_title(sram: int | None) -> str:
    return "SRAM unbounded" if sram is None else f"SRAM {sram:,} bytes"
