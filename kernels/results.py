"""``python -m kernels results``: stored GPU measurements as Markdown, the tables of the README.

Measurements are files of ``kernels/results``, written by ``bench``, ``peers`` and ``counters``
with ``--json``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


def main(files: Iterable[Path] = ()) -> int:
    """Print each file's table."""
    paths = list(files) or sorted(FOLDER.glob("*.json"))
    if not paths:
        raise ValueError(f"files: none given, and none in {FOLDER}")
    for path in paths:
        try:
            report = json.loads(path.read_text())
            table = table_of(report)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{path}: is no report of bench, peers or counters: {reason}"
            ) from error
        print(table, end="\n\n")
    return 0


def table_of(report: dict[str, Any]) -> str:
    """The table of any of them."""
    if "rows" in report:
        return bench_table(report)
    return peers_table(report) if "peers" in report else counters_table(report)


def peers_table(report: dict[str, Any]) -> str:
    """A row a shape: TFLOP/s of ours and torch's backends; then microseconds of small problems."""
    rows = report["peers"]
    names = list(dict.fromkeys(x for row in rows for x in row["seconds"]))
    own = [x for x in ("ours", "exact maxima", "growing keys") if x in names]
    backends = [x for x in names if x not in own]
    head = ["dtype", "d", "N", "mask", "kernel, tiles", *own]
    head += [f"torch {name}" for name in backends]
    head += [f"ours / {name}" for name in backends] + ["of ceiling"]
    tops = ", ".join(f"{x / 1e12:.0f} in {name}" for name, x in report["ceiling"].items())
    lines = [f"{_about(report)} TFLOP/s; the ceiling, a matrix product: {tops}.", ""]
    lines += [_row(head), _row(["---"] * len(head))]
    for row in rows:
        speed = {name: row["flops"] / t / 1e12 for name, t in row["seconds"].items()}
        mask = "causal" if row["is_causal"] else "full"
        if row["group"] > 1:
            mask += f", {row['group']} heads a key head"
        cells = [
            row["dtype"], f"{row['d']}", f"{row['n']}", mask,
            f"`{row['variant']}` {row['block_q']} x {row['block_k']}",
        ]  # fmt: skip
        cells += [f"{speed[name]:.0f}" if name in speed else "-" for name in (*own, *backends)]
        ratios = [speed["ours"] / speed[name] if name in speed else None for name in backends]
        cells += [f"{x:.2f}" if x else "-" for x in ratios]
        cells.append(f"{100e12 * speed['ours'] / report['ceiling'][row['dtype']]:.0f} %")
        lines.append(_row(cells))
    for name in backends:
        pairs = [
            row["seconds"][name] / row["seconds"]["ours"]
            for row in rows
            if name in row["seconds"]
            and row["dtype"] == "float16"
            and row["d"] in (64, 128)
            and row["group"] == 1
        ]
        if pairs:
            mean = statistics.geometric_mean(pairs)
            lines += [
                "",
                f"Geometric mean of ours / {name} over float16 at d 64 and 128: {mean:.2f}.",
            ]
    if report["small"]:
        names = list(dict.fromkeys(x for row in report["small"] for x in row["seconds"]))
        lines += ["", "Small problems, batch 1, microseconds a call, the host's time included:", ""]
        head = ["dtype", "d", "N", "heads", *(x if "ours" in x else f"torch {x}" for x in names)]
        lines += [_row(head), _row(["---"] * len(head))]
        for row in report["small"]:
            cells = [row["dtype"], *(f"{row[name]}" for name in ("d", "n", "heads"))]
            took = row["seconds"]
            cells += [f"{1e6 * took[name]:.0f}" if name in took else "-" for name in names]
            lines.append(_row(cells))
    return "\n".join(lines)


def bench_table(report: dict[str, Any]) -> str:
    """A row a shape: TFLOP/s, and the loop orders' ratios in time and in predicted traffic."""
    backends = list(dict.fromkeys(name for row in report["rows"] for name in row["torch"]))
    head = ["d", "N", "batch x heads", "`q_outer`", "`kv_outer`"]
    head += [f"torch {name.removesuffix('_attention')}" for name in backends]
    head += ["time, kv / q", "traffic, kv / q"]
    lines = [f"{_about(report)} TFLOP/s.", "", _row(head), _row(["---"] * len(head))]
    for row in report["rows"]:
        q, kv = row["q_outer"], row["kv_outer"]
        cells = [f"{row['d']}", f"{row['n']}", f"{row['batch']} x {row['heads']}"]
        times = [q["seconds"], kv["seconds"], *(row["torch"].get(name) for name in backends)]
        cells += [f"{row['flops'] / t / 1e12:.1f}" if t else "-" for t in times]
        cells += [
            f"{kv['seconds'] / q['seconds']:.2f}",
            f"{kv['predicted_bytes'] / q['predicted_bytes']:.2f}",
        ]
        lines.append(_row(cells))
    return "\n".join(lines)


def counters_table(report: dict[str, Any]) -> str:
    """A row a launch: bytes read and written, measured and predicted."""
    head = [
        "launch",
        "read, measured",
        "read, predicted",
        "written, measured",
        "written, predicted",
    ]
    lines = [f"{_about(report)} Bytes.", "", _row(head), _row(["---"] * len(head))]
    for row in report["counters"]:
        measured, predicted = row["measured"], row["predicted"]
        cells = [f"{x:,}" for pair in zip(measured, predicted, strict=True) for x in pair]
        lines.append(_row([row["case"], *cells]))
    return "\n".join(lines)


def _about(report: dict[str, Any]) -> str:
    names = ("card", "driver", "cuda", "numba", "numba_cuda", "numpy", "torch")
    versions = ", ".join(f"{name} {report[name]}" for name in names if name in report)
    return f"`{report['command']}`: {versions.removeprefix('card ')}."


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
