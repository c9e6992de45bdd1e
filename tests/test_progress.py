"""Sweeps: progress on a terminal alone, a clean stop, and going on where one stopped."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from simattn.progress import ResumeError, sweep


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def squares(point: str) -> list[dict]:
    return [{"x": int(point), "square": int(point) ** 2}]


POINTS = ["1", "2", "3", "4"]


def interrupted_at(stop: str):
    def compute(point: str) -> list[dict]:
        if point == stop:
            raise KeyboardInterrupt
        return squares(point)

    return compute


def test_progress_is_for_terminals() -> None:
    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        swept = sweep(POINTS, squares, what={}, terminal=stream)
        assert [row["square"] for row in swept.rows] == [1, 4, 9, 16]
        assert not swept.stopped
    assert pipe.getvalue() == ""
    assert "3 of 4 done: 4" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")  # nothing left on the line


def test_an_interrupt_keeps_what_was_done() -> None:
    swept = sweep(POINTS, interrupted_at("3"), what={}, terminal=Terminal())
    assert swept.stopped
    assert (swept.done, swept.points) == (2, 4)
    assert [row["x"] for row in swept.rows] == [1, 2]
    assert swept.ending(None) == "stopped: 2 of 4 done; with --resume FILE it could go on"


def test_a_resumed_sweep_does_the_rest_alone(tmp_path: Path) -> None:
    file = str(tmp_path / "sweep.jsonl")
    what = {"over": "n", "window": (-1, 0)}
    first = sweep(POINTS, interrupted_at("3"), what=what, resume=file)
    assert first.ending(file) == f"stopped: 2 of 4 done; --resume {file} goes on"
    asked: list[str] = []

    def compute(point: str) -> list[dict]:
        asked.append(point)
        return squares(point)

    second = sweep(POINTS, compute, what=what, resume=file)
    assert asked == ["3", "4"]
    assert second.rows == [row for p in POINTS for row in squares(p)]
    asked.clear()
    assert sweep([*POINTS, "5"], compute, what=what, resume=file).rows[-1]["square"] == 25
    assert asked == ["5"]


def test_a_line_cut_short_is_done_again(tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    sweep(POINTS[:2], squares, what={"a": 1}, resume=str(file))
    file.write_text(file.read_text() + '{"point": "3", "ro')
    asked: list[str] = []

    def compute(point: str) -> list[dict]:
        asked.append(point)
        return squares(point)

    sweep(POINTS, compute, what={"a": 1}, resume=str(file))
    assert asked == ["3", "4"]
    assert [json.loads(line) for line in file.read_text().splitlines()][-1]["point"] == "4"
    assert sweep(POINTS, compute, what={"a": 1}, resume=str(file)).rows[-1]["x"] == 4
    assert asked == ["3", "4"]


@pytest.mark.parametrize("stop", [0, 14])
def test_a_first_line_cut_short_starts_anew(tmp_path: Path, stop: int) -> None:
    file = tmp_path / "sweep.jsonl"
    sweep(POINTS, squares, what={"a": 1}, resume=str(file))
    file.write_text(file.read_text()[:stop])
    assert len(sweep(POINTS, squares, what={"a": 1}, resume=str(file)).rows) == 4
    assert len(file.read_text().splitlines()) == 5


@pytest.mark.parametrize("rows", ["[{}]", '"abc"', "null", "3", "[3]", "[" * 100_000])
def test_rows_that_no_sweep_wrote_are_done_again(tmp_path: Path, rows: str) -> None:
    file = tmp_path / "sweep.jsonl"
    sweep(POINTS, squares, what={"a": 1}, resume=str(file))
    header = file.read_text().splitlines()[0]
    file.write_text(f'{header}\n{{"point": "1", "rows": {rows}}}\n')
    assert [row["x"] for row in sweep(POINTS, squares, what={"a": 1}, resume=str(file)).rows] == [
        squares(point)[0]["x"] for point in POINTS
    ]


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    sweep(POINTS, squares, what={"a": 1}, resume=str(file))
    with pytest.raises(ResumeError, match="is of another sweep"):
        sweep(POINTS, squares, what={"a": 2}, resume=str(file))
    for text in ("some notes\nof mine\n", "\nnotes\n", "[]\n", '{"point": 3}\n'):
        file.write_text(text)
        with pytest.raises(ResumeError):
            sweep(POINTS, squares, what={"a": 1}, resume=str(file))
        assert file.read_text() == text  # and left as they were
    with pytest.raises(ResumeError, match="must be readable"):
        sweep(POINTS, squares, what={"a": 1}, resume=str(tmp_path))
    with pytest.raises(ResumeError, match="must be writable"):
        sweep(POINTS, squares, what={"a": 1}, resume=str(tmp_path / "no" / "such"))
