"""``softmax``: the softmaxes of rows of scores, apart from any attention."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from simattn import run
from simattn.bounds import error_bound
from simattn.cli.arguments import Add, UsageError, refuse, take
from simattn.cli.problem import read_npz, read_qkv, read_stored
from simattn.cli.rows import (
    ERROR,
    HBM,
    NOTE,
    PEAK,
    TILED_ELEMS,
    TILES,
    VARIANT,
    WORK,
    Case,
    field_of,
    judged,
    largest_difference,
    rank,
    row_of,
)
from simattn.dtypes import DTYPES, Array, DType
from simattn.iomodel import predict_softmax
from simattn.report import Column, Report


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
        storage=storage, block_k=done.block_k, scale=1.0,
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
