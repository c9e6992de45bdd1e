"""``python -m kernels traffic | check | bench | peers | tune | counters | results``.

Exit codes: 0; 1 if counts differ or a case fails; 2 if the arguments are wrong or something that
the command needs is missing, said in one line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .problem import ALL_VARIANTS, DTYPES, TENSOR_CORES, VARIANTS, shown

MAX_SIZE = 2**48


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    from simattn.cli.arguments import joined

    args = _parser().parse_args(joined(sys.argv[1:] if argv is None else argv))
    try:
        return COMMANDS[args.command](args)
    except (
        ValueError,
        TypeError,
        NotImplementedError,
        ImportError,
        RuntimeError,
        OSError,
    ) as error:
        line = " ".join(str(error).split())
        print(f"python -m kernels {args.command}: error: {line}", file=sys.stderr)
        return 2


def _traffic(args: argparse.Namespace) -> int:
    if args.variant in VARIANTS:
        # The simulator is chosen when Numba is imported, which nothing has done so far.
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    from .traffic import compare, to_json, to_text

    comparison = compare(
        variant=args.variant, n=args.n, n_k=args.n_k, d=args.d, dv=args.dv, heads=args.heads,
        kv_heads=args.kv_heads, batch=args.batch, block_q=args.block_q, block_k=args.block_k,
        is_causal=args.causal, window_size=args.window, dtype=args.dtype, return_lse=args.lse,
        seed=args.seed,
    )  # fmt: skip
    print(to_json(comparison) if args.format == "json" else to_text(comparison))
    return 0 if comparison.equal else 1


def _check(args: argparse.Namespace) -> int:
    from .check import main
    from .driver import need_gpu

    for name in ("variant", "dtype"):
        given = getattr(args, name)
        if given and not args.cores:
            raise ValueError(f"--{name}: {','.join(given)} needs --cores, the tensor-core kernels")
    need_gpu()
    if args.cores:
        from .check_cores import main as check_cores

        return check_cores(args.variant or TENSOR_CORES, args.dtype or DTYPES, args.small)
    return main(small=args.small)


def _bench(args: argparse.Namespace) -> int:
    from .bench import main
    from .driver import need_gpu

    need_gpu()
    return main(widths=args.d, rows=args.n, is_causal=args.causal, json_path=args.json)


def _peers(args: argparse.Namespace) -> int:
    from .driver import need_gpu
    from .peers import main

    need_gpu()
    return main(
        variant=args.variant, widths=args.d, rows=args.n, dtypes=args.dtype, json_path=args.json
    )


def _tune(args: argparse.Namespace) -> int:
    from .driver import need_gpu
    from .tune import main

    need_gpu()
    return main(variant=args.variant, widths=args.d, rows=args.n, dtypes=args.dtype)


def _counters(args: argparse.Namespace) -> int:
    from .counters import launch_all, main
    from .driver import need_gpu

    need_gpu()
    if args.launch:
        launch_all()
        return 0
    return main(ncu=args.ncu, json_path=args.json)


def _results(args: argparse.Namespace) -> int:
    from .results import main

    return main(args.files)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "traffic": _traffic,
    "check": _check,
    "bench": _bench,
    "peers": _peers,
    "tune": _tune,
    "counters": _counters,
    "results": _results,
}


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    traffic = commands.add_parser(
        "traffic",
        help="count a kernel's traffic in Numba's simulator, or the emulator, beside simattn's two",
    )
    for name, default in (("n", 32), ("d", 8), ("heads", 1), ("batch", 1)):
        traffic.add_argument(f"--{name}", type=_size, default=default, help=f"default {default}")
    for name, default in (("n-k", "n"), ("dv", "d"), ("kv-heads", "heads")):
        traffic.add_argument(f"--{name}", type=_size, help=f"default: {default}")
    for name in ("block-q", "block-k"):
        traffic.add_argument(f"--{name}", type=_size, help="default 8; of mma and sm90 a GPU's own")
    traffic.add_argument("--variant", choices=ALL_VARIANTS, default="q_outer")
    traffic.add_argument("--dtype", choices=list(DTYPES), default="float32")
    traffic.add_argument("--causal", action="store_true", help="aligned bottom-right")
    traffic.add_argument(
        "--window", type=_window, default=(-1, -1), metavar="L,R",
        help="keys seen before and after; -1, the default: all",
    )  # fmt: skip
    traffic.add_argument("--lse", action="store_true", help="also write L")
    traffic.add_argument("--seed", type=_seed, default=0, help="default 0")
    traffic.add_argument("--format", choices=["text", "json"], default="text")

    check = commands.add_parser("check", help="compare with float64 on this machine's GPU")
    check.add_argument("--small", action="store_true", help="few cases, for compute-sanitizer")
    check.add_argument("--cores", action="store_true", help="the tensor-core kernels; needs torch")
    check.add_argument("--variant", choices=TENSOR_CORES, action="append", help="with --cores")
    check.add_argument(
        "--dtype", type=_dtypes, metavar="T,T", help=f"with --cores; default {','.join(DTYPES)}",
    )  # fmt: skip

    bench = commands.add_parser("bench", help="time both loop orders on this machine's GPU")
    bench.add_argument("--d", type=_sizes, default=(64, 128), metavar="D,D", help="default 64,128")
    bench.add_argument(
        "--n", type=_sizes, default=(1024, 2048, 4096, 8192), metavar="N,N",
        help="default 1024,2048,4096,8192",
    )  # fmt: skip
    bench.add_argument("--causal", action="store_true")
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")

    peers = commands.add_parser(
        "peers", help="time flash_attention beside torch's backends on this machine's GPU"
    )
    tune = commands.add_parser(
        "tune", help="time a tensor-core kernel's tile shapes on this machine's GPU"
    )
    tune.add_argument("--variant", choices=TENSOR_CORES, default=TENSOR_CORES[0])
    for timed, (widths, rows, dtypes) in (
        (peers, ((), (), ())), (tune, ((64, 128), (1024, 4096, 16384), ("float16",))),
    ):  # fmt: skip
        for name, kind, default in (
            ("d", _sizes, widths), ("n", _sizes, rows), ("dtype", _dtypes, dtypes),
        ):  # fmt: skip
            shown_default = ",".join(map(str, default)) or "all"
            timed.add_argument(
                f"--{name}", type=kind, default=default, help=f"default {shown_default}"
            )
    peers.add_argument(
        "--variant", choices=TENSOR_CORES, help="default: the kernel that flash_attention chooses"
    )
    peers.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")

    counters = commands.add_parser(
        "counters", help="compare the GPU's own counters (Nsight Compute) with the closed form"
    )
    counters.add_argument(
        "--ncu", default="ncu", metavar="PATH", help="Nsight Compute; default ncu"
    )
    counters.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    counters.add_argument("--launch", action="store_true", help="only launch: what ncu runs")

    results = commands.add_parser("results", help="print the stored GPU measurements as Markdown")
    results.add_argument("files", nargs="*", type=Path, help="default: those of the repository")
    return parser


def _size(text: str) -> int:
    return _whole(text, 1)


def _seed(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    is_number = text.isdecimal()
    if is_number and len(text) <= 20 and least <= int(text) <= MAX_SIZE:
        return int(text)
    most = f" and <= {MAX_SIZE}" if is_number and text.strip("0") else ""
    raise argparse.ArgumentTypeError(f"{shown(text)} must be a whole number >= {least}{most}")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_size(part) for part in text.split(","))


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"{shown(name)} must be one of {', '.join(DTYPES)}")
    return names


def _window(text: str) -> tuple[int, int]:
    try:
        left, right = (int(part) for part in text.split(","))
    except ValueError:
        message = f"{shown(text)} must be two whole numbers, L,R"
        raise argparse.ArgumentTypeError(message) from None
    return left, right
