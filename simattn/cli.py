"""``python -m simattn``: every variant at one problem, counted, predicted and compared.

A command is two functions: one turns parsed arguments into a `Report`, the other adds its parser
and stands in `COMMANDS`. What is wrong with the arguments is a `UsageError`, one line that names
the argument, its value and the rule. Exit codes: 0; 1 a count differs from its closed form or an
error is above its bound; 2 usage, or nothing fits the SRAM; 130 interrupted.
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
from simattn import exact, progress, run, tiling
from simattn.bench import bench
from simattn.bounds import STORES_SCORES, error_bound
from simattn.counts import Counts
from simattn.device import device
from simattn.dtypes import DTYPES, FLOAT16, Array, DType
from simattn.iomodel import predict, predict_softmax
from simattn.masks import TileGrid, tiles
from simattn.memory import SRAMCapacityError
from simattn.report import FORMATS, Column, Report, Row, render
from simattn.variants import VARIANTS

LARGEST_SIZE = 2**48
UNTILED_PAIRS = 2**18  # batch x heads x n x n_k: each is some 50 microseconds of Python
TILED_ELEMS = 2**31  # of the inputs; and of S and P of one head, where they are stored
ARRAYS = {"q", "k", "v", "x"}
SIZES = ("n", "n_k", "d", "dv", "heads", "kv_heads", "batch")
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class UsageError(ValueError):
    """One line that names the argument, its value and the rule."""


# The problem and its inputs


@dataclass(frozen=True, slots=True)
class Problem:
    """What to compute, on a file's ``arrays``, or else on random ones, drawn when needed."""

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
    scale: float
    splits: int | None
    return_lse: bool
    seed: int
    arrays: tuple[Array, Array, Array] | None = field(repr=False)

    @property
    def shape(self) -> dict[str, Any]:
        """The arguments of `simattn.predict`, variant and tiles aside."""
        names = (*SIZES, "dtype", "is_causal", "window_size", "splits", "return_lse")
        return {name: getattr(self, name) for name in names}

    @property
    def input_elems(self) -> int:
        kv_rows = self.batch * self.kv_heads * self.n_k
        return self.batch * self.heads * self.n * self.d + kv_rows * (self.d + self.dv)

    @property
    def output_elems(self) -> int:
        return self.batch * self.heads * self.n * self.dv

    def inputs(self) -> tuple[Array, Array, Array]:
        """Q, K, V as stored: (batch, heads, rows, width)."""
        if self.arrays is not None:
            return self.arrays
        draw = np.random.default_rng(self.seed).standard_normal
        rounded = DTYPES[self.dtype].round
        return (
            rounded(draw((self.batch, self.heads, self.n, self.d))),
            rounded(draw((self.batch, self.kv_heads, self.n_k, self.d))),
            rounded(draw((self.batch, self.kv_heads, self.n_k, self.dv))),
        )

    def title(self) -> list[str]:
        masks = ["causal"] if self.is_causal else []
        if self.window_size != (-1, -1):
            masks.append("window {},{}".format(*self.window_size))
        return [
            ", ".join(f"{name} {getattr(self, name)}" for name in SIZES),
            f"{self.dtype}, {' and '.join(masks) or 'no mask'}, scale {self.scale:.6g}",
        ]


def problem_of(args: argparse.Namespace) -> Problem:
    arrays = None
    if args.input is not None:
        refuse(args, SIZES, "not with --input, whose arrays have sizes")
        q, k, v, storage = read_qkv(args.input, read_npz(args.input), "qkv", args.dtype)
        (batch, heads, n, d), (_, kv_heads, n_k, dv) = q.shape, v.shape
        arrays, dtype = (q, k, v), storage.name
    else:
        n, d, heads, batch = args.n or 1024, args.d or 64, args.heads or 1, args.batch or 1
        n_k, dv, kv_heads = args.n_k or n, args.dv or d, args.kv_heads or heads
        dtype = args.dtype or "float32"
        if heads % kv_heads:
            raise UsageError(f"--kv-heads {kv_heads}: must divide --heads {heads}")
    return Problem(
        n=n, n_k=n_k, d=d, dv=dv, heads=heads, kv_heads=kv_heads, batch=batch, dtype=dtype,
        is_causal=args.causal, window_size=args.window,
        scale=1 / math.sqrt(d) if args.scale is None else args.scale,
        splits=args.splits, return_lse=args.lse, seed=args.seed, arrays=arrays,
    )  # fmt: skip


def refuse(args: argparse.Namespace, names: Iterable[str], rule: str) -> None:
    """Options that must not be there together with another one."""
    for name in names:
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: {rule}")


def read_qkv(
    path: str, found: dict[str, Array], names: Sequence[str], dtype: str | None
) -> tuple[Array, Array, Array, DType]:
    """Q, K, V of a file as stored, in four dimensions, and their format. Without v, V is K."""
    for name in names:
        if name not in found:
            raise UsageError(f"--input {path}: has no array {name}, must hold {', '.join(names)}")
        if found[name].ndim not in (2, 3, 4):
            raise UsageError(
                f"--input {path}: {name} {found[name].shape} must be (rows, width), (heads, rows, "
                "width) or (batch, heads, rows, width)"
            )
    arrays, storage = read_stored(path, found, names, dtype)
    try:
        shaped = run._checked_shapes(arrays[0], arrays[1], arrays[-1])
    except ValueError as error:
        raise UsageError(f"--input {path}: {error}") from None
    q, k, v = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in shaped)
    return q, k, v, storage


def read_stored(
    path: str, found: dict[str, Array], names: Sequence[str], dtype: str | None
) -> tuple[list[Array], DType]:
    """Arrays of a file, rounded to the format asked for, or else to their own."""
    try:
        given = {name: run._array(name, found[name]) for name in names}
        storage = run._dtype(given, dtype)
    except TypeError as error:
        raise UsageError(f"--input {path}: {error}") from None
    stored = [run._stored(x, storage) for x in given.values()]
    for name, after in zip(names, stored, strict=True):
        bad = np.count_nonzero(~np.isfinite(given[name]))
        if bad:
            raise UsageError(
                f"--input {path}: {name} holds {bad} NaN or infinite values, must be finite"
            )
        bad = np.count_nonzero(~np.isfinite(after))
        if bad:
            raise UsageError(
                f"--dtype {storage.name}: {bad} values of {name} in {path} are beyond its range"
            )
    return stored, storage


def read_npz(path: str) -> dict[str, Array]:
    """The arrays of a file that a command may ask for."""
    try:
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("a single array without a name")
            return {name: np.asarray(archive[name]) for name in archive.files if name in ARRAYS}
    except Exception as error:  # a broken file makes the reader raise almost anything
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise UsageError(f"--input {path}: must be a readable .npz of arrays ({reason})") from None


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
    splits = None
    if variant == "split_kv":
        splits = max(1, min(problem.splits or 4, -(-problem.n_k // block_k)))
    need = predicted.peak_sram_bytes
    if sram is not None and need > sram:
        return Case(variant, how, block_q, block_k, splits, None, need)
    return Case(variant, how, block_q, block_k, splits, predicted)


def is_run(problem: Problem, case: Case) -> bool:
    """Whether the case is small enough to be run, and not only predicted."""
    pairs = problem.n * problem.n_k
    if case.tiling == "untiled" and problem.batch * problem.heads * pairs > UNTILED_PAIRS:
        return False
    matrices = 2 * pairs if case.variant in STORES_SCORES else 0
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
        found.append("counts differ from the closed form")
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


# compare, predict, sweep


def cases_of(problem: Problem, args: argparse.Namespace) -> list[Case]:
    """Every variant tiled, then every variant untiled."""
    variants = dict.fromkeys(args.variant or VARIANTS)
    return [
        *(tiled_case(problem, v, args) for v in variants),
        *(fitted(problem, v, "untiled", 1, 1, args.sram) for v in variants),
    ]


def compare(args: argparse.Namespace) -> Report:
    """Run what is small enough, predict the rest."""
    problem = problem_of(args)
    rows = compared(problem, cases_of(problem, args), args.sram)
    rank(rows)
    source = args.input or f"random normal, seed {args.seed}"
    above = [*problem.title(), f"{sram_title(args.sram)}; input: {source}"]
    agree, run_rows = (sum(bool(row[name]) for row in rows) for name in ("as_predicted", "counted"))
    below = [*TRAFFIC_LEGEND, ERROR_LEGEND]
    if any(row["fits"] and not row["counted"] for row in rows):
        below += PREDICTED_LEGEND
    below += [f"Rows run: {run_rows}; of which every count equals its closed form: {agree}."]
    columns = (VARIANT, TILES, *HBM, X_BEST, PEAK, *WORK, ERROR, NOTE)
    return judged(rows, columns, above, below, f"--sram {args.sram}")


def compared(problem: Problem, cases: Sequence[Case], sram: int | None) -> list[dict[str, Any]]:
    """A row for each case, run where it can be. Inputs and oracle are made once, if at all."""
    if not any(is_run(problem, case) for case in cases):
        return [row_of(case) for case in cases]
    q, k, v = problem.inputs()
    storage = DTYPES[problem.dtype]
    same: dict[str, Any] = {
        "is_causal": problem.is_causal, "window_size": problem.window_size, "scale": problem.scale
    }  # fmt: skip
    want, want_lse = exact.attention(q, k, v, **same)
    overflow = storage is FLOAT16 and scores_overflow(problem, q, k)
    rows = []
    for case in cases:
        if not is_run(problem, case):
            rows.append(row_of(case))
            continue
        done = run.attention(
            q, k, v, **same, variant=case.variant, block_q=case.block_q, block_k=case.block_k,
            splits=problem.splits, sram_bytes=sram, dtype=storage.name,
            return_lse=problem.return_lse,
        )  # fmt: skip
        bound, lse_bound = error_bound(
            q, k, v, storage=storage, variant=case.variant, block_k=done.block_k,
            scale=problem.scale,
        )  # fmt: skip
        row = row_of(case, done, max_abs_error=largest_difference(done.out, want), tolerance=bound)
        if done.lse is not None:
            row["max_abs_lse_error"] = largest_difference(done.lse, want_lse)
            row["lse_tolerance"] = lse_bound
        if overflow and case.variant in STORES_SCORES:
            row["flagged"] = "scores overflow float16"
        rows.append(row)
    return rows


def scores_overflow(problem: Problem, q: Array, k: Array) -> bool:
    """Whether a visible score is beyond float16, the way that a variant would store it."""
    n, s = problem.n, problem.n_k
    left, right = problem.window_size
    grid = TileGrid(n, s, n, s, (left, 0 if problem.is_causal else right))
    group = problem.heads // max(problem.kv_heads, 1)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(problem.batch, problem.heads):
            K = k[b, h // group].astype(np.float32)  # [s, d]
            for i in tiles(0, n, max(1, 2**24 // max(s, 1))):
                S = q[b, h, i].astype(np.float32) @ K.T * np.float32(problem.scale)  # [Br, s]
                visible = grid.visible(i, slice(0, s))
                if not np.isfinite(FLOAT16.round(S if visible is None else S[visible])).all():
                    return True
    return False


def predict_only(args: argparse.Namespace) -> Report:
    problem = problem_of(args)
    rows = [row_of(case) for case in cases_of(problem, args)]
    rank(rows)
    above = [*problem.title(), sram_title(args.sram)]
    below = [*TRAFFIC_LEGEND, "All from the closed forms: nothing was run."]
    columns = (VARIANT, TILES, *HBM, X_BEST, PEAK, *WORK, FIT)
    return judged(rows, columns, above, below, f"--sram {args.sram}")


def sweep(args: argparse.Namespace) -> Report:
    """Predict every variant, tiled, at each of several values of one option."""
    options = {"n": ("n",), "sram": ("sram",), "block": ("block_q", "block_k")}[args.over]
    refuse(args, options, f"not with --over {args.over}, whose --values it takes")
    value_of = memory_size if args.over == "sram" else whole(1, LARGEST_SIZE)
    try:
        values = {text: value_of(text) for text in args.values.split(",")}
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--values {args.values}: {error}") from None
    points = {
        text: argparse.Namespace(**(vars(args) | dict.fromkeys(options, value)))
        for text, value in values.items()
    }
    problems = {text: problem_of(point) for text, point in points.items()}

    def rows_at(text: str) -> list[dict[str, Any]]:
        variants = dict.fromkeys(args.variant or VARIANTS)
        at_value = [row_of(tiled_case(problems[text], v, points[text])) for v in variants]
        rank(at_value)
        return [{"over": args.over, "value": values[text], **row} for row in at_value]

    others = ("command", "function", "format", "resume", "values")
    what = {name: value for name, value in vars(args).items() if name not in others}
    try:
        swept = progress.sweep(list(points), rows_at, what=what, resume=args.resume)
    except progress.ResumeError as error:
        raise UsageError(str(error)) from None
    last = list(points)[-1]
    rows, point, problem = swept.rows, points[last], problems[last]
    above = [f"{args.over} {args.values}; at the last:", *problem.title(), sram_title(point.sram)]
    below = [*TRAFFIC_LEGEND, "x best: at the same value. All from the closed forms."]
    columns = (Column(args.over, field_of("value")), VARIANT, TILES, *HBM, X_BEST, PEAK, FIT)
    if swept.stopped:
        return Report(rows, columns, above, below, 130, swept.ending(args.resume))
    budget = f"--values {args.values}" if args.over == "sram" else f"--sram {args.sram}"
    return judged(rows, columns, above, below, budget)


# softmax


def softmax(args: argparse.Namespace) -> Report:
    """The softmaxes of rows of scores, apart from any attention."""
    scores = scores_of(args)
    R, C, storage, x = scores.rows, scores.columns, scores.storage, scores.x
    Br, Bc = min(args.block_q or 64, max(R, 1)), min(args.block_k or 64, max(C, 1))
    rows = []
    for name in dict.fromkeys(args.variant or run.SOFTMAXES):
        predicted = predict_softmax(
            name, rows=R, columns=C, block_q=Br, block_k=Bc, dtype=storage.name
        )
        case = Case(name, "tiled", Br, Bc, None, predicted)
        row = row_of(case) if x is None else softmax_row(case, x, storage)
        moved = predicted.traffic.total_elems
        row["accesses_per_element"] = moved / (R * C) if R * C else None
        rows.append(row)
    rank(rows)
    above = [f"softmax of {R} rows x {C} columns, {storage.name}; scores: {scores.source}"]
    below = [
        "HBM reads and writes: elements loaded into SRAM and stored from it.",
        "Max error: largest distance to a float64 softmax of the scores as stored. naive does not",
        "subtract the maximum: where its exp over- or underflows it is flagged, not failed.",
    ]
    per_element = Column("an element", field_of("accesses_per_element"))
    columns = (VARIANT, TILES, *HBM, per_element, PEAK, *WORK[1:], ERROR, NOTE)
    return judged(rows, columns, above, below, "")


def softmax_row(case: Case, x: Array, storage: DType) -> dict[str, Any]:
    done = run.row_softmax(
        x, algorithm=case.variant, block_q=case.block_q or 1, block_k=case.block_k or 1,
        dtype=storage.name,
    )  # fmt: skip
    want = exact_softmax(x)
    # Softmax is attention with queries of 1, keys of x, and the identity for values.
    C = x.shape[1]
    bound, _ = error_bound(
        np.ones((1, 1)), np.full((C, 1), np.abs(x).max(initial=0)), np.ones((C, 1)),
        storage=storage, variant="softmax", block_k=done.block_k, scale=1.0,
    )  # fmt: skip
    row = row_of(case, done, max_abs_error=largest_difference(done.out, want), tolerance=bound)
    wrong = np.count_nonzero(~(np.abs(done.out - want) <= bound).all(axis=1))
    if wrong and case.variant == "naive":
        row["flagged"] = f"exp over- or underflows: {wrong} of {len(x)} rows wrong"
    return row


def exact_softmax(x: Array) -> Array:
    scores = x.astype(np.float64)  # [R, C]
    weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))  # [R, C]
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


@dataclass(frozen=True, slots=True)
class Scores:
    """Rows of scores; ``x`` (as stored) is None where they are too many to be made."""

    rows: int
    columns: int
    storage: DType
    x: Array | None
    source: str


def scores_of(args: argparse.Namespace) -> Scores:
    if args.input is not None:
        refuse(args, ("n", "n_k"), "not with --input, whose arrays have sizes")
        return file_scores(args)
    rows, scale = args.n or 1024, 1.0 if args.scale is None else args.scale
    columns, storage = args.n_k or rows, DTYPES[args.dtype or "float32"]
    x = None
    if rows * columns <= TILED_ELEMS:
        x = np.random.default_rng(args.seed).standard_normal((rows, columns))
        x = scaled(x, scale, storage)
    return Scores(rows, columns, storage, x, f"{scale:.6g} x random normal, seed {args.seed}")


def file_scores(args: argparse.Namespace) -> Scores:
    """``x`` of a file, scaled, or else the scaled products of its ``q`` and ``k``."""
    path, found = args.input, read_npz(args.input)
    if "x" in found:
        if found["x"].ndim != 2:
            raise UsageError(f"--input {path}: x {found['x'].shape} must be (rows, columns)")
        (x,), storage = read_stored(path, found, "x", args.dtype)
        (rows, columns), scale = x.shape, 1.0 if args.scale is None else args.scale
        x = scaled(x, scale, storage)
        return Scores(rows, columns, storage, x, f"{scale:.6g} x, of {path}")
    q, k, _, storage = read_qkv(path, found, "qk", args.dtype)
    (batch, heads, n, d), (kv_heads, s) = q.shape, k.shape[1:3]
    scale = 1 / math.sqrt(d) if args.scale is None else args.scale
    rows, scores = batch * heads * n, None
    if rows * s <= TILED_ELEMS:
        Q = q.reshape(batch, kv_heads, heads // max(kv_heads, 1) * n, d).astype(np.float64)
        S = Q @ k.astype(np.float64).swapaxes(-1, -2)  # [batch, kv_heads, group * n, s]
        scores = scaled(S.reshape(rows, s), scale, storage)
    return Scores(rows, s, storage, scores, f"{scale:.6g} q k^T, of {path}")


def scaled(x: Array, scale: float, storage: DType) -> Array:
    with np.errstate(over="ignore"):
        stored = storage.round(x.astype(np.float64) * scale)
    bad = np.count_nonzero(~np.isfinite(stored))
    if bad:
        raise UsageError(f"--scale {scale:g}: {bad} scores are beyond the range of {storage.name}")
    return stored


# plan


def plan(args: argparse.Namespace) -> Report:
    """The tiles of each rule, and whether they fit once every live tile is charged."""
    problem = problem_of(args)
    if args.device is not None:
        args.sram = device_sram(args.device)
    width = DTYPES[problem.dtype].width_bytes
    pairs = problem.batch * problem.heads * problem.n * problem.n_k
    bound = pairs * problem.d * problem.dv * width / (args.sram / width)  # N^2 d^2 / M
    compulsory = (problem.input_elems + problem.output_elems) * width
    rows: list[dict[str, Any]] = []
    for variant in dict.fromkeys(args.variant or ("q_outer", "kv_outer")):
        found = tiling.plan(variant, args.sram, granule=args.granule, **problem.shape)
        least = tiling.smallest_budget(variant, granule=args.granule, **problem.shape)
        for rule in ("seed", "paper", "best"):
            chosen = next((tiles for tiles in found if tiles.rule == rule), None)
            row = {
                "variant": variant,
                "rule": rule,
                "block_q": chosen and chosen.block_q,
                "block_k": chosen and chosen.block_k,
                **predicted_fields(chosen.counts if chosen else None),
                "fits": chosen is not None and chosen.fits,
                "smallest_sram_bytes": chosen.counts.peak_sram_bytes if chosen else least,
                "compulsory_bytes": compulsory,
            }
            total = total_bytes(row)
            row["total_vs_compulsory"] = total / compulsory if total and compulsory else None
            row["total_vs_n2d2_over_m"] = total / bound if total and bound else None
            rows.append(row)
    above = [*problem.title(), f"SRAM {args.sram:,} bytes, M = {args.sram // width:,} elements"]
    below = [
        "seed: Br = ceil(M / 4d), Bc = min(Br, d). paper: Bc = ceil(M / 4d), Br = min(Bc, d).",
        f"best: the fewest HBM bytes of all tiles that fit, in multiples of {args.granule} rows.",
        "SRAM needed: bytes, with every live tile charged; the two rules leave S out of their sum.",
        f"x least: HBM bytes over {compulsory:,}, those of Q, K, V and O once each.",
        f"x N2d2/M: over {bound:,.0f}, N^2 d^2 / M elements (arXiv 2402.07443, for M >= d^2).",
    ]
    columns = (
        Column("variant", field_of("variant"), left=True),
        Column("rule", field_of("rule"), left=True),
        TILES,
        *HBM,
        Column("x least", ratio("total_vs_compulsory")),
        Column("x N2d2/M", ratio("total_vs_n2d2_over_m")),
        Column("SRAM needed", field_of("smallest_sram_bytes")),
        Column("fits", field_of("fits"), left=True),
    )
    best = [row for row in rows if row["rule"] == "best"]
    if any(row["fits"] for row in best):
        return Report(rows, columns, above, below)
    least = min(row["smallest_sram_bytes"] for row in best)
    failure = f"--sram {args.sram}: fits no tiles, must be at least {least} bytes"
    return Report(rows, columns, above, below, 2, failure)


def device_sram(name: str) -> int:
    try:
        return device(name).sram_bytes
    except ValueError as error:
        raise UsageError(f"--{error}") from None


# bench


def run_bench(args: argparse.Namespace) -> Report:
    elems = args.heads * args.n * max(args.n, args.d)
    if elems > TILED_ELEMS:
        raise UsageError(f"--n {args.n}: makes arrays of {elems} elements, must be at most 2^31")
    rows = bench(
        heads=args.heads, n=args.n, d=args.d, block=args.block, repeat=args.repeat, seed=args.seed
    )
    columns = (
        Column("loop", field_of("loop"), left=True),
        Column("median s", field_of("median_s")),
        Column("min s", field_of("min_s")),
        Column("% over uncounted", field_of("overhead_percent")),
        Column("by min", field_of("min_overhead_percent")),
        Column("x plain's speed", field_of("speed_over_plain")),
        Column("by min", field_of("min_speed_over_plain")),
    )
    above = [
        f"heads {args.heads}, n {args.n}, d {args.d}, tiles {args.block} x {args.block}, float32, "
        f"{args.repeat} rounds",
    ]
    below = [
        "counted: q_outer on the simulated memories. uncounted: the same loop, bare NumPy.",
        "plain: softmax(QK^T)V. Ratios: median over rounds, then of the fastest rounds.",
    ]
    return Report(rows, columns, above, below)


# Argument types: text to a value, or an error that says what the text must be


def whole(least: int, largest: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (re.fullmatch(r"-?[0-9]{1,999}", text) and least <= int(text)):
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least {least}")
        if largest is not None and int(text) > largest:
            raise argparse.ArgumentTypeError(f"{text!r} must be at most {largest}")
        return int(text)

    return parse


size = whole(1, LARGEST_SIZE)


def memory_size(text: str) -> int:
    """Bytes, or a number with a unit, that makes a whole number of bytes.

    >>> memory_size("100000"), memory_size("1.5KiB"), memory_size("100 KB")
    (100000, 1536, 100000)
    """
    match = re.fullmatch(r"([0-9]{1,30}(?:\.[0-9]{1,30})?) ?([^\W\d_]*)", text)
    units = {name.lower(): factor for name, factor in UNITS.items()}
    if match and match[2].lower() not in {"", *units}:
        raise argparse.ArgumentTypeError(
            f"{text!r} has the unit {match[2]}, must be one of {', '.join(UNITS)}"
        )
    amount = Fraction(match[1]) * units.get(match[2].lower(), 1) if match else Fraction(0)
    if amount < 1 or amount.denominator != 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a whole number of bytes, at least 1, or an amount with one of "
            f"{', '.join(UNITS)}"
        )
    return int(amount)


def window(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(-1|[0-9]{1,99}),(-1|[0-9]{1,99})", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be LEFT,RIGHT: two whole numbers, each at least -1 (all keys)"
        )
    return int(match[1]), int(match[2])


def finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number")
    return value


# The parser


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and exits with 2."""

    def error(self, message: str) -> NoReturn:
        complain(self.prog, message.removeprefix("argument "))
        self.exit(2)


Add = Callable[[str, Callable[[argparse.Namespace], Report], str], argparse.ArgumentParser]

OPTIONS: dict[str, dict[str, Any]] = {
    "--n": {"type": size, "metavar": "N", "help": "query rows (1024)"},
    "--n-k": {"type": size, "metavar": "N", "help": "key rows (as many as query rows)"},
    "--d": {"type": size, "metavar": "N", "help": "width of queries and keys (64)"},
    "--dv": {"type": size, "metavar": "N", "help": "width of values (as of keys)"},
    "--heads": {"type": size, "metavar": "N", "help": "query heads (1)"},
    "--kv-heads": {"type": size, "metavar": "N", "help": "heads of keys and values (as many)"},
    "--batch": {"type": size, "metavar": "N", "help": "batch (1)"},
    "--dtype": {"choices": tuple(DTYPES), "help": "storage format (the file's, else float32)"},
    "--causal": {"action": "store_true", "help": "hide later keys; the last query sees them all"},
    "--window": {"type": window, "default": (-1, -1), "metavar": "L,R",
                 "help": "see L keys before and R after one's own position; -1: all"},
    "--splits": {"type": whole(1), "metavar": "N", "help": "parts of split_kv (4)"},
    "--lse": {"action": "store_true", "help": "store L too, the log of each row's sum"},
    "--variant": {"action": "append", "choices": tuple(VARIANTS), "metavar": "NAME",
                  "help": f"only this one; repeatable: {', '.join(VARIANTS)}"},
    "--input": {"metavar": "FILE.npz", "help": "arrays q, k, v: (rows, width), (heads, rows, "
                "width) or (batch, heads, rows, width)"},
    "--scale": {"type": finite, "metavar": "X", "help": "factor of the scores (1/sqrt(d))"},
    "--seed": {"type": whole(0), "default": 0, "metavar": "N", "help": "of random input (0)"},
    "--block-q": {"type": whole(1), "metavar": "ROWS", "help": "query rows of a tile (64; with "
                  "--sram or --block-k alone, the best)"},
    "--block-k": {"type": whole(1), "metavar": "ROWS", "help": "key rows of a tile, likewise"},
    "--sram": {"type": memory_size, "metavar": "SIZE",
               "help": f"of one program, in bytes or with a unit ({', '.join(UNITS)})"},
}  # fmt: skip
RESUME: dict[str, Any] = {
    "metavar": "FILE", "help": "keep what is done in it, and go on from what it holds",
}  # fmt: skip
SHAPE = ("--n", "--n-k", "--d", "--dv", "--heads", "--kv-heads", "--batch", "--dtype", "--causal",
         "--window", "--splits", "--lse", "--variant")  # fmt: skip
INPUT = ("--input", "--scale", "--seed")
TILE = ("--block-q", "--block-k", "--sram")


def take(parser: argparse._ActionsContainer, *options: str, **changes: Any) -> None:
    for option in options:
        parser.add_argument(option, **OPTIONS[option] | changes)


def add_compare(add: Add) -> None:
    parser = add("compare", compare, "run every variant at one problem, side by side (the default)")
    take(parser, *SHAPE, *INPUT, *TILE)


def add_softmax(add: Add) -> None:
    parser = add("softmax", softmax, "run the softmaxes of rows of scores")
    take(parser, "--n", help="rows (1024)")
    take(parser, "--n-k", help="columns (as many as rows)")
    take(parser, "--dtype", "--seed")
    take(parser, "--input", help="scores x (rows, columns), or q and k, whose products they are")
    take(parser, "--scale", help="factor of the scores (1; 1/sqrt(d) of q and k)")
    take(parser, "--block-q", help="rows of a tile (64)")
    take(parser, "--block-k", help="columns of a tile (64)")
    names = tuple(run.SOFTMAXES)
    take(parser, "--variant", choices=names, help=f"only this one; repeatable: {', '.join(names)}")


def add_predict(add: Add) -> None:
    parser = add("predict", predict_only, "the rows of compare from closed forms, at any size")
    take(parser, *SHAPE, *INPUT, *TILE)


def add_plan(add: Add) -> None:
    parser = add("plan", plan, "tile sizes for an SRAM budget, by three rules")
    take(parser, *SHAPE, *INPUT)
    budget = parser.add_mutually_exclusive_group(required=True)
    take(budget, "--sram")
    budget.add_argument("--device", metavar="NAME", help="whose SRAM to plan for: see devices")
    parser.add_argument(
        "--granule", type=whole(1), default=16, metavar="ROWS",
        help="the best tiles have a multiple of it, or all rows there are (%(default)s)",
    )  # fmt: skip


def add_sweep(add: Add) -> None:
    parser = add(
        "sweep", sweep, "predicted traffic of the tiled variants over values of one option"
    )
    parser.add_argument(
        "--over", choices=("n", "sram", "block"), required=True,
        help="what varies: query rows (and key rows, without --n-k), SRAM, or both block sizes",
    )  # fmt: skip
    parser.add_argument(
        "--values", required=True, metavar="A,B,...", help="as 256,512,1024 or 64KiB,128KiB"
    )
    take(parser, *SHAPE, *TILE)
    parser.add_argument("--resume", **RESUME)
    parser.set_defaults(input=None, scale=None, seed=0)


def add_bench(add: Add) -> None:
    parser = add("bench", run_bench, "time the counted loop beside the same loop without counters")
    for name, value in (("heads", 4), ("n", 4096), ("d", 64), ("block", 256), ("repeat", 7)):
        parser.add_argument(
            f"--{name}", type=size, default=value, metavar="N", help="(%(default)s)"
        )
    take(parser, "--seed")


def add_insight(add: Add) -> None:
    """The commands of ``cli_insight.py``, which stands on this file."""
    from simattn import cli_insight

    for add_command in cli_insight.COMMANDS:
        add_command(add)


COMMANDS: tuple[Callable[[Add], None], ...] = (
    add_compare,
    add_softmax,
    add_predict,
    add_plan,
    add_sweep,
    add_bench,
    add_insight,
)


def parser() -> Parser:
    top = Parser(
        prog="python -m simattn", allow_abbrev=False, epilog="Without a command: compare.",
        description="Attention on a counted memory hierarchy.",
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"simattn {simattn.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, function: Callable[[argparse.Namespace], Report], does: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=does, description=does, allow_abbrev=False)
        sub.add_argument("--format", choices=FORMATS, default="text", help="(%(default)s)")
        sub.set_defaults(function=function)
        return sub

    for add_command in COMMANDS:
        add_command(add)
    return top


def with_command(argv: Sequence[str]) -> list[str]:
    """argv with its command, and with values that look like options joined to theirs.

    >>> with_command(["--window", "-1,0"])
    ['compare', '--window=-1,0']
    """
    words = list(argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, "compare")
    joined = words[:1]
    for word in words[1:]:
        if re.match(r"-([\d.,]|inf|nan)", word) and re.fullmatch(r"--[a-z-]+", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


# Output and exit codes


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    words = with_command(sys.argv[1:] if argv is None else argv)
    prog = f"python -m simattn {words[0]}"
    try:
        args = parser().parse_args(words)
        report = args.function(args)
        code = put(prog, render(report, args.format) + "\n", report.exit_code)
    except SystemExit as stop:  # from argparse, which has said why
        return put(prog, "", int(stop.code or 0))
    except UsageError as error:
        return complain(prog, str(error))
    except MemoryError:
        return complain(prog, "--n and the other sizes: must be small enough for this memory")
    except KeyboardInterrupt:
        return 130
    if report.failure:
        complain(prog, report.failure)
    return code


def complain(prog: str, message: str) -> int:
    """One line on standard error, whatever the message holds."""
    print(f"{prog}: {' '.join(message.split())}", file=sys.stderr)
    return 2


def put(prog: str, text: str, code: int) -> int:
    """Print; a reader that went away, as ``| head`` does, leaves the exit code as it is."""
    try:
        try:
            print(text, end="", flush=True)
        except UnicodeEncodeError:  # a file name in a terminal that can't spell it
            print(text.encode("ascii", "backslashreplace").decode(), end="", flush=True)
    except OSError as error:
        # What is left in the buffer would fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            return complain(prog, f"standard output: must be writable ({error.strerror})")
    return code
