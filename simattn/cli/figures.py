"""``figures``: published numbers, ours beside them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from simattn import figures, progress
from simattn.cli.arguments import RESUME, Add, UsageError
from simattn.cli.files import stopped, usage
from simattn.cli.problem import read_npz, read_qkv
from simattn.cli.rows import field_of
from simattn.report import Column, Report


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
