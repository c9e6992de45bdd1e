"""Files that a command writes, and errors of the library as errors of the arguments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from simattn import device, progress
from simattn.cli.arguments import UsageError
from simattn.device import Device


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
