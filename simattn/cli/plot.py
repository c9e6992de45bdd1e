"""``plot``: pictures of the counts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from simattn import plot, progress, trace
from simattn.cli.arguments import RESUME, Add, UsageError, take
from simattn.cli.devices import add_device
from simattn.cli.files import machine_of, stopped, usage, writable
from simattn.cli.rows import field_of
from simattn.cli.trace import record_all
from simattn.dtypes import DTYPES
from simattn.report import Column, Report

SUFFIXES = (".png", ".svg", ".pdf")


def draw(args: argparse.Namespace) -> Report:
    """One picture, into a file."""
    if not args.out.endswith(SUFFIXES):
        raise UsageError(f"--out {args.out}: must end in {', '.join(SUFFIXES)}")
    writable("--out", args.out)
    machine = machine_of(args.device or "a100")
    sram = args.sram or (machine.sram_bytes if args.device else 100 * 1024)
    shape: dict[str, Any] = {
        "n": args.n, "d": args.d, "dtype": args.dtype, "is_causal": args.causal
    }  # fmt: skip
    asked = {key: value for key, value in shape.items() if value}
    swept = progress.Swept([], 0, 0)
    below: list[str] = []
    with usage():
        plot.figure(1, 1)  # is matplotlib there?
        match args.kind:
            case "traffic-n":
                fig = plot.traffic_n(sram, **without(asked, "n"))
            case "traffic-sram":
                swept, moved, budgets = sram_sweep(asked, args.resume)
                fig = plot.traffic_sram(moved=moved, budgets=budgets, **asked)
                below = [line for rule in moved for line in where_they_cross(rule, moved, budgets)]
            case "tile-size":
                fig = plot.tile_size()
            case "heatmap":
                fig = plot.heatmap(sram, **asked)
            case "roofline":
                floor_shape = {"n": 4096, "d": 64, "heads": 16, "batch": 4} | asked
                fig = plot.roofline(machine, **floor_shape)
            case "slopes":
                fig = plot.slopes()
            case _:
                fig = plot.occupancy(occupancy_traces(args), machine_of(args.device or "classroom"))
        plot.save(fig, args.out)
    rows = [{"kind": args.kind, "file": args.out, "file_bytes": os.path.getsize(args.out)}]
    columns = (
        Column("picture", field_of("kind"), left=True),
        Column("file", field_of("file"), left=True),
        Column("bytes", field_of("file_bytes")),
    )
    return Report(rows, columns, [], below, **stopped(swept, args.resume))


def without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


def sram_sweep(
    asked: dict[str, Any], resume: str | None
) -> tuple[progress.Swept, dict[str, dict[str, list[int | None]]], list[int]]:
    """HBM bytes of both loop orders by rule and budget; what was not done is None."""
    shape: dict[str, Any] = {"n": 4096, "d": 64, "dtype": "float16"} | asked
    budgets = plot.sram_budgets(shape["d"], DTYPES[shape["dtype"]].width_bytes)
    points = [f"{rule} {M}" for M in budgets for rule in ("seed", "paper", "best")]

    def at(point: str) -> list[progress.Row]:
        rule, M = point.split()
        moved = {v: plot.rule_bytes(rule, v, int(M), **shape) for v in plot.ORDERS}
        return [{"rule": rule, "sram_bytes": int(M), **moved}]

    swept = progress.sweep(points, at, what={"traffic-sram": shape}, resume=resume)
    found = {(row["rule"], row["sram_bytes"]): row for row in swept.rows}
    moved = {
        rule: {v: [found.get((rule, M), {}).get(v) for M in budgets] for v in plot.ORDERS}
        for rule in ("seed", "paper", "best")
    }
    return swept, moved, budgets


def where_they_cross(
    rule: str, moved: dict[str, dict[str, list[int | None]]], budgets: list[int]
) -> Iterator[str]:
    """A line for each crossing of the loop orders under a tile rule, or one that there is none."""
    found = plot.crossings(budgets, moved[rule])
    for c in found:
        yield f"{rule}: {c.winner} moves less from {c.after:,} bytes (not yet at {c.before:,})"
    if not found:
        yield f"{rule}: no crossing from {budgets[0]:,} to {budgets[-1]:,} bytes"


def occupancy_traces(args: argparse.Namespace) -> list[trace.Trace]:
    small = argparse.Namespace(
        n=args.n or 16, n_k=None, d=args.d or 8, dv=None, dtype=args.dtype or "float32", seed=0,
        causal=args.causal, window=(-1, -1), splits=None, block_q=4, block_k=4,
        sram=args.sram or 1024, variant=None,
    )  # fmt: skip
    return record_all(small, trace.PLAYER_LIMIT)


KINDS = {
    "traffic-n": "traffic against N, by loop order",
    "traffic-sram": "traffic against SRAM under each tile rule, with the crossing",
    "tile-size": "traffic against key rows of a tile (FlashAttention's Figure 2 middle)",
    "heatmap": "traffic over both tile sizes, with the edge of the capacity and the optimum",
    "roofline": "FLOP/s that the floors allow against intensity",
    "occupancy": "what lies in SRAM over time",
    "slopes": "traffic against SRAM below and above d^2",
}


def add_plot(add: Add) -> None:
    parser = add("plot", draw, "a picture, with matplotlib (the extra 'plot')")
    parser.add_argument(
        "kind", choices=tuple(KINDS), metavar="KIND",
        help="; ".join(f"{kind}: {what}" for kind, what in KINDS.items()),
    )  # fmt: skip
    parser.add_argument("--out", required=True, metavar="FILE", help=", ".join(SUFFIXES))
    take(parser, "--n", "--d", "--causal")
    take(parser, "--dtype", help="storage format (float16; float32 for occupancy)")
    take(parser, "--sram", help="of one program (100 KiB, or the device's; 1 KiB for occupancy)")
    add_device(parser)
    parser.add_argument("--resume", **RESUME)
