"""Long sweeps: progress on a terminal, a clean stop on Ctrl-C, and going on where one stopped.

What a point gave is written to the resume file at once, a JSON line each, so that nothing done is
lost however the run ends. The first line says which sweep it is: another one is refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import simattn

Row = dict[str, Any]


class ResumeError(ValueError):
    """A resume file that can't be used. The message names the file and the rule."""


@dataclass(frozen=True, slots=True)
class Swept:
    """The rows of the points that were done, in order, and how many points there are."""

    rows: list[Row]
    done: int
    points: int

    @property
    def stopped(self) -> bool:
        return self.done < self.points

    def ending(self, resume: str | None) -> str:
        """A line that says how far it got, and how to go on."""
        again = f"--resume {resume} goes on" if resume else "with --resume FILE it could go on"
        return f"stopped: {self.done} of {self.points} done; {again}"


def sweep(
    points: Sequence[str],
    compute: Callable[[str], Sequence[Row]],
    *,
    what: Mapping[str, Any],
    resume: str | None = None,
    terminal: IO[str] | None = None,
) -> Swept:
    """Rows of every point, until done or interrupted.

    ``what`` describes the sweep, for the resume file; ``terminal`` (standard error by default)
    gets a line of progress if it is one. Raises `ResumeError` for a resume file that
    can't be used.
    """
    terminal = sys.stderr if terminal is None else terminal
    known = _read(resume, what) if resume else {}
    rows: list[Row] = []
    done = 0
    file = _open(resume, what, bool(known)) if resume else None
    try:
        for done, point in enumerate(points):
            if terminal.isatty():
                terminal.write(f"\r\x1b[K{done} of {len(points)} done: {point}")
                terminal.flush()
            if point not in known:
                known[point] = list(compute(point))
                if file:
                    file.write(json.dumps({"point": point, "rows": known[point]}) + "\n")
                    file.flush()
            rows += known[point]
        done = len(points)
    except KeyboardInterrupt:
        pass
    finally:
        if terminal.isatty():
            terminal.write("\r\x1b[K")
            terminal.flush()
        if file:
            file.close()
    return Swept(rows, done, len(points))


def _read(path: str, what: Mapping[str, Any]) -> dict[str, list[Row]]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ResumeError(f"--resume {path}: must be readable ({reason})") from None
    if not text:
        return {}
    header, *lines = text.split("\n")
    if not header.startswith('{"sweep"'):
        raise ResumeError(f"--resume {path}: must be a file that a sweep wrote")
    if lines and _parsed(header) != _parsed(_header(what)):
        raise ResumeError(f"--resume {path}: is of another sweep, or of another version")
    known: dict[str, list[Row]] = {}
    for line in lines:
        entry = _parsed(line)
        rows = entry.get("rows") if isinstance(entry, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) and row for row in rows):
            break  # a last line cut short is done again
        known[str(entry.get("point"))] = rows
    return known


def _header(what: Mapping[str, Any]) -> str:
    return json.dumps({"sweep": dict(what), "version": simattn.__version__})


def _parsed(line: str) -> Any:
    """The value of a line of JSON; None where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _open(path: str, what: Mapping[str, Any], known: bool) -> IO[str]:
    try:
        file = open(path, "r+" if known else "w", encoding="utf-8")  # noqa: SIM115
        if known:
            whole = file.read().rfind("\n") + 1
            file.seek(whole)
            file.truncate()
        else:
            file.write(_header(what) + "\n")
    except OSError as error:
        raise ResumeError(f"--resume {path}: must be writable ({error.strerror})") from None
    return file
