"""The commands that turn counts into insight: figures, floor, devices, plot and trace.

They follow ``cli.py``: a command makes a `Report` of parsed arguments, and says in one line what is
wrong with them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from simattn import device, figures, plot, progress, tiling, trace
from simattn.cli import (
    RESUME,
    SHAPE,
    Add,
    UsageError,
    field_of,
    problem_of,
    read_npz,
    read_qkv,
    take,
)
from simattn.device import DEVICES, Device
from simattn.dtypes import DTYPES
from simattn.memory import SRAMCapacityError
from simattn.report import Column, Report
from simattn.variants import VARIANTS

SUFFIXES = (".png", ".svg", ".pdf")


@contextmanager
def usage() -> Iterator[None]:
    """A ValueError of the library becomes one line about the arguments."""
    try:
        yield
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from None


def machine_of(name: str) -> Device:
    with usage():
        return device.device(name)


def writable(option: str, path: str) -> None:
    """Refuse a file that can't be written before the work, not after it."""
    folder = os.path.dirname(path) or "."
    reason = ""
    if os.path.isdir(path):
        reason = "it is a directory"
    elif not os.path.isdir(folder):
        reason = f"no directory {folder}"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        reason = "permission denied"
    if reason:
        raise UsageError(f"{option} {path}: must be writable ({reason})")


def write(option: str, path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{option} {path}: must be writable ({error.strerror})") from None


def stopped(swept: progress.Swept, resume: str | None) -> dict[str, Any]:
    """How a report ends when Ctrl-C ended the work early."""
    return {"exit_code": 130, "failure": swept.ending(resume)} if swept.stopped else {}


# figures


def published(args: argparse.Namespace) -> Report:
    """Every published figure beside ours."""
    items = list(dict.fromkeys(args.only or figures.ITEMS))
    given = None
    if args.input is not None:
        q, k, v, _ = read_qkv(args.input, read_npz(args.input), "qkv", None)
        if k.shape[-3] != q.shape[-3]:
            raise UsageError(f"--input {args.input}: k must have as many heads as q")
        given = {"q": q, "k": k, "v": v}

    def rows_of(item: str) -> list[figures.Row]:
        return figures.flash_attention_4(given) if item == "fa4" else figures.ITEMS[item]()

    with usage():
        what = {"figures": items, "input": args.input}
        swept = progress.sweep(items, rows_of, what=what, resume=args.resume)
    columns = (
        Column("id", field_of("id"), left=True),
        Column("printed", number("printed")),
        Column("ours", number("ours")),
        Column("ratio", lambda row: f"{row['ratio']:.3f}"),
        Column("unit", field_of("unit"), left=True),
        Column("how", lambda row: row["how"].partition(":")[0], left=True),
    )
    below = ["Does not reproduce:", *(f"  {line}" for line in figures.failures(swept.rows))]
    note = "Sources and the whole of how: --format json. GB is 1e9 bytes, MB 2^20."
    return Report(
        swept.rows, columns, [], [*(below if len(below) > 1 else []), note],
        **stopped(swept, args.resume),
    )  # fmt: skip


def number(name: str) -> Callable[[Any], str]:
    """A column of numbers of any size, to six figures."""

    def shown(row: Any) -> str:
        value = row[name]
        return f"{value:,.0f}" if abs(value) >= 1e6 else f"{value:.6g}"

    return shown


def add_figures(add: Add) -> None:
    parser = add("figures", published, "published figures beside ours, with the ratio")
    parser.add_argument(
        "--only", action="append", choices=tuple(figures.ITEMS), metavar="ITEM",
        help=f"only this one; repeatable: {', '.join(figures.ITEMS)}",
    )  # fmt: skip
    parser.add_argument("--input", metavar="FILE.npz", help="count fa4's rescales in q, k, v too")
    parser.add_argument("--resume", **RESUME)


# devices and floor


def list_devices(args: argparse.Namespace) -> Report:
    """The machines that have names, and where their numbers come from."""
    rows = [
        {
            "device": name,
            **{key: getattr(m, key) for key in Device.__slots__ if key != "matmul_flops_per_s"},
            "matmul_flops_per_s": dict(m.matmul_flops_per_s),
        }
        for name, m in [(name, DEVICES[name]) for name in DEVICES]
        + [(path, machine_of(path)) for path in args.device or ()]
    ]
    columns = (
        Column("device", field_of("device"), left=True),
        Column("SMs", field_of("sms")),
        Column("SRAM a block", field_of("sram_bytes")),
        Column("L2", field_of("l2_bytes")),
        Column("DRAM GB/s", lambda row: round(row["dram_bytes_per_s"] / 1e9)),
        Column("L2 GB/s", lambda row: round(row["l2_bytes_per_s"] / 1e9)),
        Column("shared GB/s", lambda row: round(row["shared_bytes_per_s"] / 1e9)),
        Column("exp 1e9/s", lambda row: round(row["exp_per_s"] / 1e9)),
        Column("fp16 TFLOP/s", lambda row: tera(row, "float16")),
        Column("fp32 TFLOP/s", lambda row: tera(row, "float32")),
    )
    return Report(rows, columns, [], [f"{row['device']}: {row['source']}" for row in rows])


def tera(row: Any, dtype: str) -> float | None:
    rate: float | None = row["matmul_flops_per_s"].get(dtype)
    return rate and round(rate / 1e12, 4)


def add_devices(add: Add) -> None:
    parser = add("devices", list_devices, "the named devices, and where their numbers come from")
    parser.add_argument("--device", action="append", metavar="FILE.toml", help="and this one's")


def floor(args: argparse.Namespace) -> Report:
    """The least time of every variant on each device, and what binds it."""
    args.dtype = args.dtype or "float16"
    problem = problem_of(args)
    rows: list[dict[str, Any]] = []
    machines = {name: machine_of(name) for name in args.device or DEVICES}
    for name, machine in machines.items():
        for variant in dict.fromkeys(args.variant or VARIANTS):
            row: dict[str, Any] = {"device": name, "variant": variant}
            tiles = tiling.best(variant, machine.sram_bytes, **problem.shape)
            rows.append(row | (floor_fields(machine, variant, tiles, problem.shape)))
    columns = (
        Column("device", field_of("device"), left=True),
        Column("variant", field_of("variant"), left=True),
        Column("tiles", lambda r: r["block_q"] and f"{r['block_q']} x {r['block_k']}", left=True),
        *(Column(f"{term} ms", milliseconds(f"{term}_s")) for term in TERMS),
        Column("floor ms", milliseconds("floor_s")),
        Column("binds", field_of("binds"), left=True),
        Column("FLOP/DRAM byte", field_of("flops_per_dram_byte")),
        Column("FLOP/L2 byte", field_of("flops_per_l2_byte")),
    )
    below = [
        "The floor is the largest of the five: counts over peak rates, a bound and no forecast.",
        "dram: each tensor once, S and P out and in where they outgrow L2. l2: the counted HBM",
        "traffic, which on a GPU goes from L2 to the SMs. Tiles: the best for the device's SRAM.",
    ]
    if any(row["block_q"] for row in rows):
        return Report(rows, columns, problem.title(), below)
    failure = "--device: no variant has tiles that fit its SRAM"
    return Report(rows, columns, problem.title(), below, 2, failure)


TERMS = ("dram", "l2", "matmul", "exp", "shared")


def floor_fields(
    machine: Device, variant: str, tiles: tiling.Tiles | None, shape: dict[str, Any]
) -> dict[str, Any]:
    names = ("block_q", "block_k", *(f"{term}_s" for term in TERMS), "floor_s", "binds",
             "flops_per_dram_byte", "flops_per_l2_byte", "dram_bytes", "l2_bytes",
             "shared_bytes")  # fmt: skip
    if tiles is None:
        return dict.fromkeys(names)
    Br, Bc = tiles.block_q, tiles.block_k
    with usage():
        f = device.time_floor(machine, variant, block_q=Br, block_k=Bc, **shape)
    values = (Br, Bc, *(f.terms_s[term] for term in TERMS), f.seconds, f.binds,
              f.flops_per_dram_byte, f.flops_per_l2_byte, f.dram_bytes, f.l2_bytes,
              f.shared_bytes)  # fmt: skip
    return dict(zip(names, values, strict=True))


def milliseconds(name: str) -> Callable[[Any], float | None]:
    return lambda row: None if row[name] is None else 1e3 * float(row[name])


def add_floor(add: Add) -> None:
    parser = add("floor", floor, "the least time of each variant on a device, and what binds it")
    take(parser, *SHAPE)
    add_device(parser, action="append", help=f"{DEVICE_HELP}; repeatable (all named ones)")
    parser.set_defaults(input=None, scale=None, seed=0)


DEVICE_HELP = f"{', '.join(DEVICES)}, or a TOML file of one's own"


def add_device(parser: argparse.ArgumentParser, **changes: Any) -> None:
    options: dict[str, Any] = {"metavar": "NAME", "help": DEVICE_HELP} | changes
    parser.add_argument("--device", **options)


# plot


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


# trace


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


COMMANDS = (add_figures, add_floor, add_devices, add_plot, add_trace)
