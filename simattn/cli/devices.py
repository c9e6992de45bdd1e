"""``devices`` and ``floor``: named machines, and what binds each variant on them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from simattn import device
from simattn.cli.arguments import SHAPE, Add, take
from simattn.cli.files import machine_of, usage
from simattn.cli.problem import problem_of
from simattn.cli.rows import field_of
from simattn.device import DEVICES, Device, Placed
from simattn.report import Column, Report
from simattn.variants import VARIANTS


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
            with usage():
                placed = device.least_floor(
                    machine, variant, block_q=args.block_q, block_k=args.block_k, **problem.shape
                )
            rows.append({"device": name, "variant": variant, **floor_fields(placed)})
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
        "traffic, which on a GPU goes from L2 to the SMs. Tiles: those that fit the device's SRAM",
        "and have the least floor, of 16, 32, 48, 64, 96, 128, ... rows.",
    ]
    if any(row["block_q"] for row in rows):
        return Report(rows, columns, problem.title(), below)
    failure = "--device: no variant has tiles that fit its SRAM"
    return Report(rows, columns, problem.title(), below, 2, failure)


TERMS = ("dram", "l2", "matmul", "exp", "shared")


def floor_fields(placed: Placed | None) -> dict[str, Any]:
    names = ("block_q", "block_k", *(f"{term}_s" for term in TERMS), "floor_s", "binds",
             "flops_per_dram_byte", "flops_per_l2_byte", "dram_bytes", "l2_bytes",
             "shared_bytes")  # fmt: skip
    if placed is None:
        return dict.fromkeys(names)
    f = placed.floor
    values = (placed.block_q, placed.block_k, *(f.terms_s[term] for term in TERMS), f.seconds,
              f.binds, f.flops_per_dram_byte, f.flops_per_l2_byte, f.dram_bytes, f.l2_bytes,
              f.shared_bytes)  # fmt: skip
    return dict(zip(names, values, strict=True))


def milliseconds(name: str) -> Callable[[Any], float | None]:
    return lambda row: None if row[name] is None else 1e3 * float(row[name])


def add_floor(add: Add) -> None:
    parser = add("floor", floor, "the least time of each variant on a device, and what binds it")
    take(parser, *SHAPE)
    take(parser, "--block-q", "--block-k", help="rows of a tile (those of the least floor)")
    add_device(parser, action="append", help=f"{DEVICE_HELP}; repeatable (all named ones)")
    parser.set_defaults(input=None, scale=None, seed=0)


DEVICE_HELP = f"{', '.join(DEVICES)}, or a TOML file of one's own"


def add_device(parser: argparse.ArgumentParser, **changes: Any) -> None:
    options: dict[str, Any] = {"metavar": "NAME", "help": DEVICE_HELP} | changes
    parser.add_argument("--device", **options)
