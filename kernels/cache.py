"""PTX on disk, so that a kernel is compiled once for all processes.

Files live in the folder that ``SIMATTN_CACHE_DIR`` names, by default ``simattn`` in the user's
cache folder; an empty ``SIMATTN_CACHE_DIR`` keeps none. A file's name is a hash of everything that
its content depends on, so that nothing is ever out of date. A folder that cannot be written, or a
file that is damaged, only means compiling again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

DIGEST_BYTES = 32


def folder() -> Path | None:
    """Where the files are; None: nowhere."""
    chosen = os.environ.get("SIMATTN_CACHE_DIR")
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # a user without a home
        return Path(base) / "simattn" if base else Path.home() / ".cache" / "simattn"
    return None


def key(*parts: str) -> str:
    """A file's name, from what its content depends on.

    >>> key("a", "b") == key("a", "b"), key("a", "b") == key("ab")
    (True, False)
    """
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read(name: str) -> bytes | None:
    """What was written under this name; None if nothing was, or not all of it."""
    where = folder()
    if where is None:
        return None
    try:
        stored = (where / name).read_bytes()
    except OSError:
        return None
    content = stored[DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == stored[:DIGEST_BYTES] else None


def write(name: str, content: bytes) -> None:
    """Keep it, whole or not at all, however many processes write it at once."""
    where = folder()
    if where is None:
        return
    with contextlib.suppress(OSError):
        where.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=where, prefix=f"{name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            Path(path).replace(where / name)
        except BaseException:
            Path(path).unlink(missing_ok=True)
            raise
