"""``python -m simattn``: every variant at one problem, counted, predicted and compared.

A command is a function that adds its parser (at the end of this file, in `COMMANDS`) and one that
turns the parsed arguments into a `Report`. What is wrong with the arguments is a `UsageError`: one
line that names the argument, its value and the rule. Exit codes: 0; 1 a count that differs from its
closed form, or an error above its bound; 2 usage, or nothing that fits the SRAM; 130 interrupted.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np

import simattn
from simattn import exact, run, tiling
from simattn.bench import bench
from simattn.bounds import STORES_SCORES, error_bound
from simattn.counts import Counts
from simattn.dtypes import DTYPES, FLOAT16, Array, DType
from simattn.iomodel import predict, predict_softmax
from simattn.masks import TileGrid, tiles
from simattn.memory import SRAMCapacityError
from simattn.report import FORMATS, Column, Report, Row, render
from simattn.variants import VARIANTS

LARGEST_SIZE = 1 << 48
UNTILED_PAIRS = 1 << 18  # batch x heads x n x n_k: each is some 50 microseconds of Python
TILED_ELEMS = 1 << 31  # inputs, and with standard_* the S and P of a head
SIZES = ("n", "n_k", "d", "dv", "heads", "kv_heads", "batch")
UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30,
         "KB": 10**3, "MB": 10**6, "GB": 10**9}  # fmt: skip


class UsageError(ValueError):
    """One line that names the argument, its value and the rule."""


# The problem


@dataclass(frozen=True, slots=True)
class Problem:
    """What to compute. The inputs are those of a file, or random and drawn when they are needed."""

    n: int
    n_k: int
    d: int
    dv: int
    heads: int
    kv_heads: int
    batch: int
    dtype: str
    is_causal: bool
    window_size: tuple[int, int]
    splits: int | None
    return_lse: bool
    scale: float
    seed: int
    file: str | None
    arrays: tuple[Array, Array, Array] | None = field(repr=False)

    @property
    def shape(self) -> dict[str, Any]:
        """The arguments of `simattn.predict`, tiles aside."""
        names = (*SIZES, "dtype", "is_causal", "window_size", "splits", "return_lse")
        return {name: getattr(self, name) for name in names}

    @property
    def storage(self) -> DType:
        return DTYPES[self.dtype]

    @property
    def input_elems(self) -> int:
        kv_rows = self.batch * self.kv_heads * self.n_k
        return self.batch * self.heads * self.n * self.d + kv_rows * (self.d + self.dv)

    def inputs(self) -> tuple[Array, Array, Array]:
        """Q, K, V as stored: (batch, heads, rows, width)."""
        if self.arrays is not None:
            return self.arrays
        rng = np.random.default_rng(self.seed)
        q, k, v = (
            self.storage.round(rng.standard_normal((self.batch, heads, rows, width)))
            for heads, rows, width in (
                (self.heads, self.n, self.d),
                (self.kv_heads, self.n_k, self.d),
                (self.kv_heads, self.n_k, self.dv),
            )
        )
        return q, k, v

    def title(self, sram: str = "") -> list[str]:
        left, right = self.window_size
        masks = ["causal"] * self.is_causal + [f"window {left},{right}"] * (left >= 0 or right >= 0)
        facts = [self.dtype, " and ".join(masks) or "no mask", f"scale {self.scale:.6g}"]
        return [
            ", ".join(f"{name} {getattr(self, name):,}" for name in SIZES),
            ", ".join(facts + [sram] * bool(sram)),
        ]


def problem_of(args: argparse.Namespace) -> Problem:
    arrays = None
    if args.input is not None:
        refuse_sizes(args, SIZES)
        arrays, storage = read_qkv(args.input, args.dtype)
        (batch, heads, n, d), (_, kv_heads, n_k, dv) = arrays[0].shape, arrays[2].shape
        dtype = storage.name
    else:
        n, d, heads, batch = args.n or 1024, args.d or 64, args.heads or 1, args.batch or 1
        n_k, dv, kv_heads = args.n_k or n, args.dv or d, args.kv_heads or heads
        dtype = args.dtype or "float32"
        if heads % kv_heads:
            raise UsageError(f"--kv-heads {kv_heads}: must divide --heads {heads}")
    return Problem(
        n=n, n_k=n_k, d=d, dv=dv, heads=heads, kv_heads=kv_heads, batch=batch, dtype=dtype,
        is_causal=args.causal, window_size=args.window, splits=args.splits, return_lse=args.lse,
        scale=1 / math.sqrt(d) if args.scale is None else args.scale, seed=args.seed,
        file=args.input, arrays=arrays,
    )  # fmt: skip


def refuse_sizes(args: argparse.Namespace, names: Iterable[str]) -> None:
    for name in names:
        if getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option} {getattr(args, name)}: not with --input, whose arrays have sizes"
            )


def read_qkv(path: str, dtype: str | None) -> tuple[tuple[Array, Array, Array], DType]:
    """Q, K, V of a file, as stored and with four dimensions, and their format."""
    found = read_npz(path)
    require(path, found, "q", "k", "v")
    for name in "qkv":
        if found[name].ndim not in (2, 3, 4):
            raise UsageError(
                f"--input {path}: {name} has shape {found[name].shape}, must be (rows, width), "
                "(heads, rows, width) or (batch, heads, rows, width)"
            )
    try:
        *stored, storage = run._inputs(*(found[name] for name in "qkv"), dtype)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--input {path}: {error}") from None
    for name, array in zip("qkv", stored, strict=True):
        require_finite(path, name, found[name], array, storage)
    q, k, v = (array.reshape((-1,) * (array.ndim < 4) + array.shape) for array in stored)
    return (q, k, v), storage


def read_npz(path: str) -> dict[str, Array]:
    """The arrays of a file that a command may ask for."""
    try:
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array, not a set of named ones")
            return {name: np.asarray(archive[name]) for name in archive.files if name in "qkvx"}
    except Exception as error:  # a broken file makes the reader raise almost anything
        reason = error.strerror if isinstance(error, OSError) else None
        raise UsageError(
            f"--input {path}: must be a readable .npz file of plain arrays ({reason or error})"
        ) from None


def require(path: str, found: dict[str, Array], *names: str) -> None:
    missing = [name for name in names if name not in found]
    if missing:
        raise UsageError(
            f"--input {path}: has no array {missing[0]}, must hold {', '.join(names)}"
        )


def require_finite(path: str, name: str, given: Array, stored: Array, storage: DType) -> None:
    bad = np.count_nonzero(~np.isfinite(given))
    if bad:
        raise UsageError(
            f"--input {path}: {name} holds {bad} NaN or infinite values, all must be finite"
        )
    bad = np.count_nonzero(~np.isfinite(stored))
    if bad:
        raise UsageError(
            f"--dtype {storage.name}: {bad} values of {name} in {path} are too large for it"
        )


# Rows


@dataclass(frozen=True, slots=True)
class Case:
    """A variant at one choice of tiles: a row to be.

    ``predicted`` is None where the tiles do not fit the SRAM, or none that do exist; then
    ``smallest_sram_bytes`` is what it would take.
    """

    variant: str
    tiling: str
    block_q: int | None
    block_k: int | None
    splits: int | None
    predicted: Counts | None
    smallest_sram_bytes: int | None

    @property
    def name(self) -> str:
        return f"{self.variant} {self.tiling}"

    def head(self) -> dict[str, Any]:
        return {
            "variant": self.variant, "tiling": self.tiling, "block_q": self.block_q,
            "block_k": self.block_k, "splits": self.splits,
        }  # fmt: skip


def tiled_case(
    problem: Problem, variant: str, block_q: int | None, block_k: int | None, sram: int | None
) -> Case:
    try:
        block_q, block_k = run.choose_blocks(variant, block_q, block_k, sram, **problem.shape)
    except SRAMCapacityError:
        least = tiling.smallest_budget(variant, block_q=block_q, block_k=block_k, **problem.shape)
        return Case(variant, "tiled", block_q, block_k, None, None, least)
    return case_of(problem, variant, "tiled", block_q, block_k, sram)


def case_of(
    problem: Problem, variant: str, how: str, block_q: int, block_k: int, sram: int | None
) -> Case:
    predicted = predict(variant, block_q=block_q, block_k=block_k, **problem.shape)
    splits = None
    if variant == "split_kv":
        splits = max(1, min(problem.splits or 4, -(-problem.n_k // block_k)))
    least = predicted.peak_sram_bytes
    if sram is not None and least > sram:
        return Case(variant, how, block_q, block_k, splits, None, least)
    return Case(variant, how, block_q, block_k, splits, predicted, None)


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


def count_fields(counted: Counts | None, predicted: Counts | None) -> dict[str, Any]:
    """Every count, as counted and as predicted; null where there is none."""
    both = (("", counted), ("predicted", predicted))
    return {
        predicted_name(name) if kind else name: None if counts is None else value(counts)
        for kind, counts in both
        for name, value in COUNTS.items()
    }


def shown(name: str) -> Callable[[Row], Any]:
    """A count for people: as counted, or else as predicted."""
    return lambda row: row[predicted_name(name)] if row[name] is None else row[name]


def total_bytes(row: Row) -> int | None:
    read, written = shown("hbm_read_bytes")(row), shown("hbm_write_bytes")(row)
    return None if read is None else read + written


def rank(rows: Sequence[dict[str, Any]]) -> None:
    """Give each row its total as a multiple of the smallest one."""
    totals = [total_bytes(row) for row in rows]
    best = min((total for total in totals if total is not None), default=0)
    for row, total in zip(rows, totals, strict=True):
        row["total_vs_best"] = None if total is None else total / best if best else 1.0


def row_of(
    case: Case, done: run.Run | None, accuracy: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The row of a case that was run, or wasn't. ``accuracy``: see `accuracy_of`."""
    return {
        **case.head(),
        "counted": done is not None,
        "as_predicted": None if done is None else done.as_predicted,
        **count_fields(done and done.counts, case.predicted),
        **(accuracy or accuracy_of(None, None)),
        "fits": case.predicted is not None,
        "smallest_sram_bytes": case.smallest_sram_bytes,
    }


def accuracy_of(
    error: float | None, tolerance: float | None, flagged: str | None = None
) -> dict[str, Any]:
    """Fields on the distance to the oracle. A flagged row is exempt from its tolerance."""
    return {"max_abs_error": error, "tolerance": tolerance, "flagged": flagged}


def largest_difference(got: Array, want: Array) -> float:
    """Equal infinities do not differ, nor do two NaNs; one NaN does, by NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(got.astype(np.float64) - want)
    difference[(got == want) | (np.isnan(got) & np.isnan(want))] = 0
    return float(difference.max(initial=0.0))


def faults(row: Row) -> list[str]:
    """What is wrong with a row that was run."""
    wrong = []
    if row["as_predicted"] is False:
        wrong.append("its counts differ from the closed form")
    for error, tolerance in (("max_abs_error", "tolerance"), ("max_abs_lse_error", "lse_tolerance")):
        value, limit = row.get(error), row.get(tolerance)
        if value is not None and not row["flagged"] and not value <= limit:
            wrong.append(f"{error} {value:.3g} is above its bound {limit:.3g}")
    return wrong


def note(row: Row) -> str | None:
    if not row["fits"]:
        return f"does not fit: needs {row['smallest_sram_bytes']:,} bytes"
    wrong = "; ".join(faults(row))
    return wrong or row["flagged"] or (None if row["counted"] else "predicted")


def verdict(
    rows: Sequence[Row], columns: Sequence[Column], above: list[str], below: list[str], sram: Any
) -> Report:
    """The report, with its exit code and what goes with it."""
    wrong = [f"{row['variant']} {row['tiling']}: {fault}" for row in rows for fault in faults(row)]
    if wrong:
        return Report(rows, columns, above, below, 1, "; ".join(wrong))
    if rows and not any(row["fits"] for row in rows):
        row = min(rows, key=lambda row: int(row["smallest_sram_bytes"]))
        least = f"the smallest budget that works is {row['smallest_sram_bytes']} bytes"
        failure = f"--sram {sram}: nothing fits, {least} ({row['variant']} {row['tiling']})"
        return Report(rows, columns, above, below, 2, failure)
    return Report(rows, columns, above, below)


def tile_sizes(row: Row) -> str | None:
    return None if row["block_q"] is None else f"{row['block_q']} x {row['block_k']}"


def variant_name(row: Row) -> str:
    return f"{row['variant']} p={row['splits']}" if row["splits"] else str(row["variant"])


VARIANT_COLUMN = Column("variant", variant_name, left=True)
TRAFFIC_COLUMNS = (
    Column("tiles", tile_sizes),
    Column("HBM reads", shown("hbm_read_elems")),
    Column("HBM writes", shown("hbm_write_elems")),
    Column("HBM bytes", total_bytes),
)
BEST_COLUMN = Column("x best", lambda row: row["total_vs_best"])
SRAM_COLUMN = Column("peak SRAM", shown("peak_sram_bytes"))
WORK_COLUMNS = (
    Column("matmul FLOPs", shown("matmul_flops")),
    Column("other FLOPs", shown("nonmatmul_flops")),
    Column("exp", shown("exp_count")),
)
NOTE_COLUMN = Column("note", note, left=True)
COMPARE_COLUMNS = (
    VARIANT_COLUMN, *TRAFFIC_COLUMNS, BEST_COLUMN, SRAM_COLUMN, *WORK_COLUMNS,
    Column("max error", lambda row: row["max_abs_error"]), NOTE_COLUMN,
)  # fmt: skip
LEGEND = (
    "HBM reads and writes: elements that programs load into their SRAM and store from it, over all "
    "heads and batches;",
    "HBM bytes: both, in bytes; x best: against the fewest bytes. Peak SRAM: bytes of the largest "
    "program.",
    "On a GPU this is traffic between L2 and the SMs: DRAM sees K and V once where they fit L2.",
)


# compare and predict


def sram_title(sram: int | None) -> str:
    return "SRAM unbounded" if sram is None else f"SRAM {sram:,} bytes"


def cases_of(problem: Problem, args: argparse.Namespace) -> list[Case]:
    """Every variant tiled, then every variant untiled."""
    chosen = list(dict.fromkeys(args.variant or VARIANTS))
    return [
        *(tiled_case(problem, v, args.block_q, args.block_k, args.sram) for v in chosen),
        *(case_of(problem, v, "untiled", 1, 1, args.sram) for v in chosen),
    ]


def is_small_enough(problem: Problem, case: Case) -> bool:
    """Whether it is run, and not only predicted."""
    pairs = problem.n * problem.n_k
    if case.tiling == "untiled" and problem.batch * problem.heads * pairs > UNTILED_PAIRS:
        return False
    matrices = 2 * pairs if case.variant in STORES_SCORES else 0
    return problem.input_elems <= TILED_ELEMS and matrices <= TILED_ELEMS


def compare(args: argparse.Namespace) -> Report:
    problem = problem_of(args)
    cases = cases_of(problem, args)
    runnable = [case for case in cases if case.predicted and is_small_enough(problem, case)]
    rows: list[dict[str, Any]]
    if runnable:
        check = Check(problem)
        rows = [check.row(case) if case in runnable else row_of(case, None) for case in cases]
    else:
        rows = [row_of(case, None) for case in cases]
    rank(rows)
    source = f"random normal, seed {args.seed}" if args.input is None else f"from {args.input}"
    above = [*problem.title(sram_title(args.sram)), f"input {source}"]
    below = [*LEGEND]
    if runnable:
        below += ["Max error: against untiled float64 attention on the same input."]
    if any(row["fits"] and not row["counted"] for row in rows):
        below += [
            "Predicted: too large to run (untiled above 2^18 pairs of rows, tiled above 2^31 "
            "elements), so the closed form."
        ]
    exact_rows = sum(row["as_predicted"] is True for row in rows)
    below += [f"{exact_rows} of {len(runnable)} rows run: every count equals its closed form."]
    return verdict(rows, COMPARE_COLUMNS, above, below, args.sram)


def predict_only(args: argparse.Namespace) -> Report:
    problem = problem_of(args)
    rows = [row_of(case, None) for case in cases_of(problem, args)]
    rank(rows)
    above = problem.title(sram_title(args.sram))
    below = ["From the closed forms alone: nothing was run.", *LEGEND]
    return verdict(rows, COMPARE_COLUMNS, above, below, args.sram)


class Check:
    """Inputs and the oracle's answer, made once for all the rows of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.q, self.k, self.v = problem.inputs()
        self.masks = {"is_causal": problem.is_causal, "window_size": problem.window_size}
        self.out, self.lse = exact.attention(
            self.q, self.k, self.v, scale=problem.scale, **self.masks  # type: ignore[arg-type]
        )
        self._overflows: bool | None = None

    def row(self, case: Case) -> dict[str, Any]:
        problem = self.problem
        done = run.attention(
            self.q, self.k, self.v, scale=problem.scale, variant=case.variant,
            block_q=case.block_q, block_k=case.block_k, splits=problem.splits,
            dtype=problem.dtype, return_lse=problem.return_lse,
            **self.masks,  # type: ignore[arg-type]
        )  # fmt: skip
        ...
