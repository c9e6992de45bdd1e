"""``plan``: tile sizes for an SRAM budget or a device, by three rules."""

from __future__ import annotations

import argparse
from typing import Any

from simattn import tiling
from simattn.cli.arguments import INPUT, SHAPE, Add, UsageError, take, whole
from simattn.cli.problem import problem_of
from simattn.cli.rows import (
    HBM,
    TILES,
    field_of,
    predicted_fields,
    ratio,
    total_bytes,
)
from simattn.device import device
from simattn.dtypes import DTYPES
from simattn.report import Column, Report


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
