"""``python -m kernels results``: stored GPU measurements as Markdown, the tables of the README.

Measurements are files of ``kernels/results``, written by ``bench``, ``peers`` and ``counters``
with ``--json``.
"""

from __future__ import annotations

import json
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
    """A row a shape: TFLOP/s of ours and torch's backends, and ours over each of theirs."""
    rows = report["peers"]
    backends = [x for x in dict.fromkeys(x for row in rows for x in row["seconds"]) if x != "ours"]
    head = ["dtype", "d", "N", "mask", "kernel", "tiles", "ours"]
    head += [f"torch {name}" for name in backends]
    head += [f"ours / {name}" for name in backends] + ["of ceiling"]
    tops = ", ".join(f"{x / 1e12:.0f} in {name}" for name, x in report["ceiling"].items())
    lines = [f"{_about(report)} TFLOP/s; the ceiling, a matrix product: {tops}.", ""]
    lines += [_row(head), _row(["---"] * len(head))]
    for row in rows:
        speed = {name: row["flops"] / t / 1e12 for name, t in row["seconds"].items()}
        cells = [
            row["dtype"], f"{row['d']}", f"{row['n']}", "causal" if row["is_causal"] else "full",
            f"`{row['variant']}`", f"{row['block_q']} x {row['block_k']}", f"{speed['ours']:.0f}",
        ]  # fmt: skip
        cells += [f"{speed[name]:.0f}" if name in speed else "-" for name in backends]
        cells += [
            f"{speed['ours'] / speed[name]:.2f}" if name in speed else "-" for name in backends
        ]
        cells.append(f"{100 * speed['ours'] * 1e12 / report['ceiling'][row['dtype']]:.0f} %")
        lines.append(_row(cells))
    return "\n".join(lines)


def bench_table(report: dict[str, Any]) -> str:
    """A row a shape: TFLOP/s, and the loop orders' ratios in time and in predicted traffic."""
    backends = list(dict.fromkeys(name for row in report["rows"] for name in row["torch"]))
    head = ["d", "N", "batch x heads", "`q_outer`", "`kv_outer`"]
    head += [f"torch {name.removesuffix('_attention')}" for name in backends]
    head += ["time, kv / q", "traffic, kv / q"]
    lines = [_about(report), "", _row(head), _row(["---"] * len(head))]
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
    lines = [_about(report), "", _row(head), _row(["---"] * len(head))]
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
