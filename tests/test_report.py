"""Rows to text, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simattn.report import FORMATS, Column, Report, cell, render

ROWS = [
    {"name": "first", "count": 1234567, "part": {"Q": 1, "K": 2}, "error": 1.5e-7, "ok": True},
    {"name": "2|nd", "count": 8, "part": {"K": 3, "V": 4}, "error": math.nan, "ok": False},
    {"name": "third", "count": None, "part": None, "error": None, "ok": None},
]
COLUMNS = [
    Column("name", lambda row: row["name"], left=True),
    Column("count", lambda row: row["count"]),
    Column("never", lambda row: None),
    Column("blank", lambda row: ""),
    Column("error", lambda row: row["error"]),
]
REPORT = Report(ROWS, COLUMNS, ["Title"], ["Legend 1", "Legend 2"])


def test_text_aligns_numbers_right_and_words_left_and_leaves_empty_columns_out():
    assert render(REPORT, "text").splitlines() == [
        "Title",
        "",
        "name       count    error",
        "-----  ---------  -------",
        "first  1,234,567  1.5e-07",
        "2|nd           8      nan",
        "third          -        -",
        "",
        "Legend 1",
        "Legend 2",
    ]


def test_markdown_escapes_bars():
    assert render(REPORT, "md").splitlines() == [
        "Title",
        "",
        "| name | count | error |",
        "| :-- | --: | --: |",
        "| first | 1,234,567 | 1.5e-07 |",
        r"| 2\|nd | 8 | nan |",
        "| third | - | - |",
        "",
        "Legend 1",
        "Legend 2",
    ]


def test_csv_gives_each_entry_a_column_beside_its_field():
    assert render(REPORT, "csv").splitlines() == [
        "name,count,part.Q,part.K,part.V,error,ok",
        "first,1234567,1,2,,1.5e-07,true",
        "2|nd,8,,3,4,,false",
        "third,,,,,,",
    ]


def test_json_has_every_field_and_null_where_there_is_no_number():
    got = json.loads(render(REPORT, "json"), parse_constant=pytest.fail)
    assert got == [ROWS[0], {**ROWS[1], "error": None}, ROWS[2]]


def test_json_nulls_infinities_inside_mappings():
    report = Report([{"x": {"a": math.inf, "b": 1}}], [])
    assert json.loads(render(report, "json"), parse_constant=pytest.fail) == [
        {"x": {"a": None, "b": 1}}
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_a_report_without_rows_is_still_one(form):
    assert isinstance(render(Report([], COLUMNS), form), str)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (-1234, "-1,234"), (2**60, f"{2**60:,}"), (0.0, "0"), (1 / 3, "0.333"),
     (True, "yes"), (False, "no"), (None, "-"), ("1 x 1", "1 x 1")],
)  # fmt: skip
def test_cell(value, text):
    assert cell(value) == text


fields = st.dictionaries(
    st.text("abcdef_", min_size=1, max_size=6),
    st.none() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1),
    min_size=1,
)  # fmt: skip


@given(st.lists(fields, min_size=1))
def test_json_and_csv_round_trip(rows):
    report = Report(rows, [])
    assert json.loads(render(report, "json")) == rows
    header, *lines = csv.reader(io.StringIO(render(report, "csv"), newline=""))
    assert header == list(dict.fromkeys(name for row in rows for name in row))
    assert lines == [
        ["" if row.get(name) is None else str(row[name]) for name in header] for row in rows
    ]
