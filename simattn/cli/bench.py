"""``bench``: what counting costs."""

from __future__ import annotations

import argparse

from simattn.bench import bench
from simattn.cli.arguments import Add, UsageError, size, take
from simattn.cli.rows import TILED_ELEMS, field_of
from simattn.report import Column, Report


def run_bench(args: argparse.Namespace) -> Report:
    elems = args.heads * args.n * max(args.n, args.d)
    if elems > TILED_ELEMS:
        raise UsageError(f"--n {args.n}: makes arrays of {elems} elements, must be at most 2^31")
    rows = bench(
        threads=args.threads,
        heads=args.heads,
        n=args.n,
        d=args.d,
        block=args.block,
        repeat=args.repeat,
        seed=args.seed,
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
        f"{args.repeat} rounds, BLAS threads {args.threads}",
    ]
    below = [
        "counted: q_outer on the simulated memories. uncounted: the same loop, bare NumPy.",
        "plain: softmax(QK^T)V. Ratios: median over rounds, then of the fastest rounds.",
    ]
    return Report(rows, columns, above, below)


def add_bench(add: Add) -> None:
    parser = add("bench", run_bench, "time the counted loop beside the same loop without counters")
    for name, value in (
        ("heads", 4),
        ("n", 4096),
        ("d", 64),
        ("block", 256),
        ("repeat", 7),
        ("threads", 1),
    ):
        parser.add_argument(
            f"--{name}", type=size, default=value, metavar="N", help="(%(default)s)"
        )
    take(parser, "--seed")
