"""``trace``: a run tile by tile, as a player and as a Chrome trace."""

from __future__ import annotations

import argparse

from simattn import plot, tiling, trace
from simattn.cli.arguments import Add, UsageError, take
from simattn.cli.devices import DEVICE_HELP, add_device
from simattn.cli.files import machine_of, usage, writable, write
from simattn.cli.rows import field_of
from simattn.dtypes import DTYPES
from simattn.memory import SRAMCapacityError
from simattn.report import Column, Report


def record_all(args: argparse.Namespace, limit: int) -> list[trace.Trace]:
    import numpy as np

    n_k, dv = args.n_k or args.n, args.dv or args.d
    draw_normal = np.random.default_rng(args.seed).standard_normal
    storage = DTYPES[args.dtype]
    if max(args.n, n_k) * max(args.d, dv) > 2**27:
        raise UsageError(f"--n {args.n}: makes arrays of more than 2^27 elements")
    q, k, v = (
        storage.round(draw_normal(shape)) for shape in ((args.n, args.d), (n_k, args.d), (n_k, dv))
    )
    traces = []
    for variant in dict.fromkeys(args.variant or plot.ORDERS):
        try:
            traces.append(
                trace.record(
                    variant, q, k, v, block_q=args.block_q, block_k=args.block_k, dtype=args.dtype,
                    is_causal=args.causal, window_size=args.window, splits=args.splits,
                    sram_bytes=args.sram, limit=limit,
                )
            )  # fmt: skip
        except SRAMCapacityError:
            least = tiling.smallest_budget(
                variant, n=args.n, n_k=n_k, d=args.d, dv=dv, dtype=args.dtype,
                block_q=args.block_q, block_k=args.block_k, is_causal=args.causal,
                window_size=args.window, splits=args.splits,
            )  # fmt: skip
            raise UsageError(
                f"--sram {args.sram}: {variant} with tiles of {args.block_q} x {args.block_k} "
                f"needs at least {least} bytes"
            ) from None
    return traces


def traced(args: argparse.Namespace) -> Report:
    """Record a run of each variant and write it down, as Chrome's JSON, as a player, or both."""
    if not (args.chrome or args.player):
        raise UsageError("trace: needs --chrome FILE.json, --player FILE.html, or both")
    if args.chrome == args.player:
        raise UsageError(f"--player {args.player}: must not be the file of --chrome")
    files = [(o, p) for o, p in (("--chrome", args.chrome), ("--player", args.player)) if p]
    for option, path in files:
        writable(option, path)
    machine = machine_of(args.device)
    with usage():
        limit = trace.PLAYER_LIMIT if args.player else trace.CHROME_LIMIT
        traces = record_all(args, limit)
        if args.dtype not in machine.matmul_flops_per_s:
            raise UsageError(f"--dtype {args.dtype}: {machine.name} states no peak for it")
        if args.chrome:
            write("--chrome", args.chrome, trace.chrome(traces, machine))
        if args.player:
            write("--player", args.player, trace.player(traces))
    rows = [
        {
            "variant": t.variant, "block_q": t.block_q, "block_k": t.block_k,
            "events": len(t.events), "hbm_read_bytes": t.counts.traffic.total_read_bytes,
            "hbm_write_bytes": t.counts.traffic.total_write_bytes,
            "peak_sram_bytes": t.counts.peak_sram_bytes, "matmul_flops": t.counts.flops.matmul,
            "as_predicted": t.counts == t.predicted,
        }
        for t in traces
    ]  # fmt: skip
    columns = (
        Column("variant", field_of("variant"), left=True),
        Column("tiles", lambda row: f"{row['block_q']} x {row['block_k']}", left=True),
        Column("events", field_of("events")),
        Column("HBM bytes read", field_of("hbm_read_bytes")),
        Column("written", field_of("hbm_write_bytes")),
        Column("peak SRAM", field_of("peak_sram_bytes")),
        Column("as predicted", field_of("as_predicted"), left=True),
    )
    below = [f"wrote {path}" for _, path in files]
    wrong = [t.variant for t in traces if t.counts != t.predicted]
    if wrong:
        return Report(rows, columns, [], below, 1, f"counted differs: {', '.join(wrong)}")
    return Report(rows, columns, [], below)


def add_trace(add: Add) -> None:
    parser = add("trace", traced, "a run of one head, tile by tile, to open in a browser")
    parser.add_argument("--player", metavar="FILE.html", help="a page that plays the run")
    parser.add_argument("--chrome", metavar="FILE.json", help="for Perfetto or chrome://tracing")
    take(parser, "--n", default=16, help="query rows (16)")
    take(parser, "--n-k", "--dv", "--causal", "--window", "--splits", "--seed")
    take(parser, "--d", default=8, help="width of queries and keys (8)")
    take(parser, "--dtype", default="float32", help="storage format (float32)")
    take(parser, "--variant", help="this one; repeatable (q_outer and kv_outer)")
    for option, rows in (("--block-q", "query"), ("--block-k", "key")):
        take(parser, option, default=4, help=f"{rows} rows of a tile (4)")
    take(parser, "--sram", help="capacity of SRAM (unbounded)")
    add_device(parser, default="classroom", help=f"whose rates give durations: {DEVICE_HELP}")
