"""From an argument list to an exit code: the commands, their parser, output and errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import simattn
from simattn.cli import bench, compare, devices, figures, plan, plot, softmax, trace
from simattn.cli.arguments import Add, Parser, UsageError, complain, joined
from simattn.report import FORMATS, Report, render

COMMANDS: tuple[Callable[[Add], None], ...] = (
    compare.add_compare,
    softmax.add_softmax,
    compare.add_predict,
    plan.add_plan,
    compare.add_sweep,
    bench.add_bench,
    figures.add_figures,
    devices.add_floor,
    devices.add_devices,
    plot.add_plot,
    trace.add_trace,
)


def parser() -> Parser:
    top = Parser(
        prog="python -m simattn", allow_abbrev=False, epilog="Without a command: compare.",
        description="Attention on a counted memory hierarchy.",
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"simattn {simattn.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, function: Callable[[argparse.Namespace], Report], does: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=does, description=does, allow_abbrev=False)
        sub.add_argument("--format", choices=FORMATS, default="text", help="(%(default)s)")
        sub.set_defaults(function=function)
        return sub

    for add_command in COMMANDS:
        add_command(add)
    return top


def with_command(argv: Sequence[str]) -> list[str]:
    """argv with its command, and with values that look like options joined to theirs.

    >>> with_command(["--window", "-1,0"])
    ['compare', '--window=-1,0']
    """
    words = list(argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, "compare")
    return joined(words)


# Output and exit codes


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    words = with_command(sys.argv[1:] if argv is None else argv)
    prog = f"python -m simattn {words[0]}"
    try:
        args = parser().parse_args(words)
        report = args.function(args)
        code = put(prog, render(report, args.format) + "\n", report.exit_code)
    except SystemExit as stop:  # from argparse, which has said why
        return put(prog, "", int(stop.code or 0))
    except UsageError as error:
        return complain(prog, str(error))
    except MemoryError:
        return complain(prog, "--n and the other sizes: must be small enough for this memory")
    except KeyboardInterrupt:
        return 130
    if report.failure:
        complain(prog, report.failure)
    return code


def put(prog: str, text: str, code: int) -> int:
    """Print; a reader that went away, as ``| head`` does, leaves the exit code as it is."""
    try:
        try:
            print(text, end="", flush=True)
        except UnicodeEncodeError:  # a file name in a terminal that can't spell it
            print(text.encode("ascii", "backslashreplace").decode(), end="", flush=True)
    except OSError as error:
        # What is left in the buffer would fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            return complain(prog, f"standard output: must be writable ({error.strerror})")
    return code
