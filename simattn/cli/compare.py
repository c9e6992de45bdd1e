"""``compare``, ``predict`` and ``sweep``: every variant at one problem, or at several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from simattn import exact, progress, run
from simattn.bounds import error_bound
from simattn.cli.arguments import (
    INPUT,
    LARGEST_SIZE,
    RESUME,
    SHAPE,
    TILE,
    Add,
    UsageError,
    memory_size,
    refuse,
    take,
    whole,
)
from simattn.cli.problem import Problem, problem_of
from simattn.cli.rows import (
    ERROR,
    ERROR_LEGEND,
    FIT,
    HBM,
    NOTE,
    PEAK,
    PREDICTED_LEGEND,
    TILES,
    TRAFFIC_LEGEND,
    VARIANT,
    WORK,
    X_BEST,
    Case,
    field_of,
    fitted,
    is_run,
    judged,
    largest_difference,
    rank,
    row_of,
    sram_title,
    tiled_case,
)
from simattn.dtypes import DTYPES, FLOAT16, Array
from simattn.masks import TileGrid, tiles
from simattn.report import Column, Report
from simattn.variants import VARIANTS


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
    if problem.kv_heads < problem.heads:
        below += ["Each query head loads its own K and V: fewer K/V heads don't lower the traffic."]
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
            q, k, v, storage=storage, block_k=done.block_k, scale=problem.scale,
            variant=case.variant,
        )  # fmt: skip
        row = row_of(case, done, max_abs_error=largest_difference(done.out, want), tolerance=bound)
        if done.lse is not None:
            row["max_abs_lse_error"] = largest_difference(done.lse, want_lse)
            row["lse_tolerance"] = lse_bound
        if overflow and VARIANTS[case.variant].stores_scores:
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


def add_compare(add: Add) -> None:
    parser = add("compare", compare, "run every variant at one problem, side by side (the default)")
    take(parser, *SHAPE, *INPUT, *TILE)


def add_predict(add: Add) -> None:
    parser = add("predict", predict_only, "the rows of compare from closed forms, at any size")
    take(parser, *SHAPE, *INPUT, *TILE)


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
