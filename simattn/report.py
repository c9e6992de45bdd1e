"""Rows to text, Markdown, CSV and JSON. Knows nothing of what they mean.

A row is a flat mapping of field names to numbers, strings, booleans or None; a field may also hold
a mapping, one level deep. JSON and CSV print every field of every row; text and Markdown print a
table of chosen columns for people, with lines above and below it.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: its heading, and what it shows of a row (None: nothing)."""

    heading: str
    value: Callable[[Row], Any]
    left: bool = False  # aligned left, as words are; numbers are aligned right


@dataclass(frozen=True, slots=True)
class Report:
    """What a command found, and how it went.

    ``failure``, if any, is one line for standard error; ``exit_code`` goes with it.
    """

    rows: Sequence[Row]
    columns: Sequence[Column]
    above: Sequence[str] = ()
    below: Sequence[str] = ()
    exit_code: int = 0
    failure: str = ""


def render(report: Report, form: str) -> str:
    """The report as one of `FORMATS`, without a newline at its end.

    >>> report = Report([{"x": 1200, "y": None}], [Column("X", lambda row: row["x"])], ["Title"])
    >>> print(render(report, "text"))
    Title
    <BLANKLINE>
        X
    -----
    1,200
    >>> render(report, "csv")
    'x,y\\n1200,'
    """
    return FORMATS[form](report)


def cell(value: Any) -> str:
    """A value for people: thousands separated, three digits of a float, ``-`` for None.

    >>> [cell(x) for x in (1234567, 0.000123456, None, "q_outer", True)]
    ['1,234,567', '0.000123', '-', 'q_outer', 'yes']
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(report: Report) -> tuple[list[Column], list[list[str]]]:
    """The columns that show something, and their cells."""
    values = [[column.value(row) for row in report.rows] for column in report.columns]
    kept = [i for i, column in enumerate(values) if any(v not in (None, "") for v in column)]
    lines = zip(*([cell(v) for v in values[i]] for i in kept), strict=True)
    return [report.columns[i] for i in kept], [list(line) for line in lines]


def _text(report: Report) -> str:
    columns, lines = _table(report)
    headings = [column.heading for column in columns]
    widths = [max(map(len, texts)) for texts in zip(headings, *lines, strict=True)]

    def aligned(texts: Sequence[str]) -> str:
        parts = (
            text.ljust(width) if column.left else text.rjust(width)
            for text, width, column in zip(texts, widths, columns, strict=True)
        )
        return "  ".join(parts).rstrip()

    table = [aligned(headings), "  ".join("-" * width for width in widths), *map(aligned, lines)]
    return "\n".join(_spaced(report.above, table, report.below))


def _markdown(report: Report) -> str:
    columns, lines = _table(report)
    rule = [":--" if column.left else "--:" for column in columns]
    table = [
        "| " + " | ".join(text.replace("|", r"\|") for text in texts) + " |"
        for texts in ([column.heading for column in columns], rule, *lines)
    ]
    return "\n".join(_spaced(report.above, table, report.below))


def _spaced(*blocks: Sequence[str]) -> list[str]:
    """Lines of the blocks, a blank one between two of them."""
    lines: list[str] = []
    for block in filter(None, blocks):
        lines += ["", *block] if lines else block
    return lines


def _csv(report: Report) -> str:
    """A mapping's entries are columns of their own, ``field.entry``, empty where a row has none."""
    entries: dict[str, dict[str, None]] = {}  # by field; dicts without values are ordered sets
    for row in report.rows:
        for name, value in row.items():
            entries.setdefault(name, {}).update(dict.fromkeys(_entries(name, value)))
    names = [entry for name, found in entries.items() for entry in found or [name]]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for row in report.rows:
        flat = {k: v for name, value in row.items() for k, v in _entries(name, value).items()}
        writer.writerow(_csv_cell(flat.get(name)) for name in names)
    return out.getvalue().rstrip("\n")


def _entries(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {f"{name}.{entry}": v for entry, v in value.items()}
    return {} if value is None else {name: value}


def _csv_cell(value: Any) -> Any:
    value = _finite(value)
    return str(value).lower() if isinstance(value, bool) else value


def _json(report: Report) -> str:
    rows = [{name: _finite(value) for name, value in row.items()} for row in report.rows]
    return json.dumps(rows, indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """None for NaN and infinities, which neither JSON nor a spreadsheet can spell."""
    if isinstance(value, Mapping):
        return {name: _finite(v) for name, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


FORMATS: dict[str, Callable[[Report], str]] = {
    "text": _text,
    "md": _markdown,
    "csv": _csv,
    "json": _json,
}
