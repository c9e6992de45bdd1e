"""Arguments: what a text must be, and the options that several commands share."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, NoReturn

from simattn.dtypes import DTYPES
from simattn.report import Report
from simattn.variants import VARIANTS

LARGEST_SIZE = 2**48
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class UsageError(ValueError):
    """One line that names the argument, its value and the rule."""


def refuse(args: argparse.Namespace, names: Iterable[str], rule: str) -> None:
    """Options that must not be there together with another one."""
    for name in names:
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: {rule}")


# Argument types: text to a value, or an error that says what the text must be


def whole(least: int, largest: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (re.fullmatch(r"-?[0-9]{1,999}", text) and least <= int(text)):
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least {least}")
        if largest is not None and int(text) > largest:
            raise argparse.ArgumentTypeError(f"{text!r} must be at most {largest}")
        return int(text)

    return parse


size = whole(1, LARGEST_SIZE)


def memory_size(text: str) -> int:
    """Bytes, or a number with a unit, that makes a whole number of bytes.

    >>> memory_size("100000"), memory_size("1.5KiB"), memory_size("100 KB")
    (100000, 1536, 100000)
    """
    match = re.fullmatch(r"([0-9]{1,30}(?:\.[0-9]{1,30})?) ?([^\W\d_]*)", text)
    units = {name.lower(): factor for name, factor in UNITS.items()}
    if match and match[2].lower() not in {"", *units}:
        raise argparse.ArgumentTypeError(
            f"{text!r} has the unit {match[2]}, must be one of {', '.join(UNITS)}"
        )
    amount = Fraction(match[1]) * units.get(match[2].lower(), 1) if match else Fraction(0)
    if amount < 1 or amount.denominator != 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a whole number of bytes, at least 1, or an amount with one of "
            f"{', '.join(UNITS)}"
        )
    return int(amount)


def window(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(-1|[0-9]{1,99}),(-1|[0-9]{1,99})", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be LEFT,RIGHT: two whole numbers, each at least -1 (all keys)"
        )
    return int(match[1]), int(match[2])


def finite(text: str) -> float:
    try:
        value = float(text) if re.fullmatch(r"[-+0-9.eE]+", text) else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number")
    return value


# The parser


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and exits with 2."""

    def error(self, message: str) -> NoReturn:
        complain(self.prog, message.removeprefix("argument "))
        self.exit(2)


def joined(words: Iterable[str]) -> list[str]:
    """The words, with values that look like options joined to theirs.

    >>> joined(["plan", "--window", "-1,0", "--lse"])
    ['plan', '--window=-1,0', '--lse']
    """
    found: list[str] = []
    for word in words:
        looks = found and re.match(r"-([\d.,]|inf|nan)", word)
        if looks and re.fullmatch(r"--[a-z-]+", found[-1]):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def complain(prog: str, message: str) -> int:
    """One line on standard error, whatever the message holds."""
    print(f"{prog}: {' '.join(message.split())}", file=sys.stderr)
    return 2


Add = Callable[[str, Callable[[argparse.Namespace], Report], str], argparse.ArgumentParser]

OPTIONS: dict[str, dict[str, Any]] = {
    "--n": {"type": size, "metavar": "N", "help": "query rows (1024)"},
    "--n-k": {"type": size, "metavar": "N", "help": "key rows (as many as query rows)"},
    "--d": {"type": size, "metavar": "N", "help": "width of queries and keys (64)"},
    "--dv": {"type": size, "metavar": "N", "help": "width of values (as of keys)"},
    "--heads": {"type": size, "metavar": "N", "help": "query heads (1)"},
    "--kv-heads": {"type": size, "metavar": "N", "help": "heads of keys and values (as many)"},
    "--batch": {"type": size, "metavar": "N", "help": "batch (1)"},
    "--dtype": {"choices": tuple(DTYPES), "help": "storage format (the file's, else float32)"},
    "--causal": {"action": "store_true", "help": "hide later keys; the last query sees them all"},
    "--window": {"type": window, "default": (-1, -1), "metavar": "L,R",
                 "help": "see L keys before and R after one's own position; -1: all"},
    "--splits": {"type": whole(1), "metavar": "N", "help": "parts of split_kv (4)"},
    "--lse": {"action": "store_true", "help": "store L too, the log of each row's sum"},
    "--variant": {"action": "append", "choices": tuple(VARIANTS), "metavar": "NAME",
                  "help": f"only this one; repeatable: {', '.join(VARIANTS)}"},
    "--input": {"metavar": "FILE.npz", "help": "arrays q, k, v: (rows, width), (heads, rows, "
                "width) or (batch, heads, rows, width)"},
    "--scale": {"type": finite, "metavar": "X", "help": "factor of the scores (1/sqrt(d))"},
    "--seed": {"type": whole(0), "default": 0, "metavar": "N", "help": "of random input (0)"},
    "--block-q": {"type": whole(1), "metavar": "ROWS", "help": "query rows of a tile (64; with "
                  "--sram or --block-k alone, the best)"},
    "--block-k": {"type": whole(1), "metavar": "ROWS", "help": "key rows of a tile, likewise"},
    "--sram": {"type": memory_size, "metavar": "SIZE",
               "help": f"of one program, in bytes or with a unit ({', '.join(UNITS)})"},
}  # fmt: skip
RESUME: dict[str, Any] = {
    "metavar": "FILE", "help": "keep what is done in it, and go on from what it holds",
}  # fmt: skip
SHAPE = ("--n", "--n-k", "--d", "--dv", "--heads", "--kv-heads", "--batch", "--dtype", "--causal",
         "--window", "--splits", "--lse", "--variant")  # fmt: skip
INPUT = ("--input", "--scale", "--seed")
TILE = ("--block-q", "--block-k", "--sram")


def take(parser: argparse._ActionsContainer, *options: str, **changes: Any) -> None:
    for option in options:
        parser.add_argument(option, **OPTIONS[option] | changes)
