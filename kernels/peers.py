"""``python -m kernels peers``: `flash_attention` beside torch's backends, in one process.

16,384 tokens and 2,048 hidden columns whatever the sequence length and width, random normal input.
Each launch is timed alone, between device events, on a cold L2 cache: 512 MB are zeroed before it.
Contestants take turns, round after round, so that all see the same clocks; a time is the median.
The ceiling is torch's matrix product of 8192 x 8192 in the same type, timed in the same way: what
the card's power lets its tensor cores do. Causal counts half the work.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from .bench import HIDDEN, TOKENS, environment
from .check_cores import Case, problem_of
from .compiled import Kernel, compile_all
from .launch import flash_attention, prepare
from .plans import plan
from .problem import TENSOR_CORES
from .sm90_layout import Sm90Layout, layout_for

HANGS_AFTER_S = 240
ROUND_SECONDS, ROUNDS = 0.02, 7  # a round of launches is about so long, and 3 to 20 launches
FLUSH_BYTES = 1 << 29
CEILING = 8192
BACKENDS = ("flash_attention", "cudnn_attention", "efficient_attention")


@dataclass(frozen=True, slots=True)
class Contestant:
    """What is timed, and the context that it is launched in."""

    launch: Callable[[], object]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True, slots=True)
class Shape:
    """16,384 tokens, 2,048 hidden columns; ``group`` query heads share a key head."""

    n: int
    d: int
    dtype: str
    is_causal: bool
    group: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(batch, heads, rows, width)."""
        return max(1, TOKENS // self.n), max(1, HIDDEN // self.d), self.n, self.d

    @property
    def flops(self) -> int:
        batch, heads, n, d = self.sizes
        return 4 * batch * heads * n * n * d // (2 if self.is_causal else 1)


def shapes() -> Iterator[Shape]:
    """What is timed: float16 in full; one length of other types, widths, and shared keys."""
    masks = (False, True)
    for d, is_causal, n in itertools.product((64, 128), masks, (1024, 4096, 16384)):
        yield Shape(n, d, "float16", is_causal)
    for d, is_causal in itertools.product((256, 96), masks):
        yield Shape(4096, d, "float16", is_causal)
    yield Shape(4096, 128, "float16", True, group=8)
    for dtype, d, is_causal in itertools.product(("bfloat16", "float32"), (64, 128), masks):
        yield Shape(4096, d, dtype, is_causal)


SMALL = tuple(itertools.product((64, 128), (128, 512)))  # d, N


def main(
    *,
    variant: str | None = None,
    widths: tuple[int, ...] = (),
    rows: tuple[int, ...] = (),
    dtypes: tuple[str, ...] = (),
    json_path: Path | None = None,
) -> int:
    """Time every shape of these widths, lengths and types (none given: all); print the tables."""
    from .results import peers_table

    chosen = [
        x
        for x in shapes()
        if (not widths or x.d in widths)
        and (not rows or x.n in rows)
        and (not dtypes or x.dtype in dtypes)
    ]
    if not chosen:
        asked = command(None, widths, rows, dtypes).partition("peers ")[2]
        known = (
            f"{name} {', '.join(map(str, sorted({getattr(x, name) for x in shapes()})))}"
            for name in ("d", "n", "dtype")
        )
        raise ValueError(f"{asked}: must be of a shape that is timed: {'; '.join(known)}")
    report: dict[str, Any] = {"command": command(variant, widths, rows, dtypes), **environment()}
    report |= {"ceiling": {}, "peers": [], "small": []}
    compile_all(kernel for shape in chosen for kernel in kernels_of(shape, variant))
    for dtype in dict.fromkeys(x.dtype for x in chosen):
        report["ceiling"][dtype] = ceiling(dtype)
    for shape in chosen:
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        report["peers"].append(measure(shape, variant))
        if json_path:
            json_path.write_text(json.dumps(report, indent=1) + "\n")
    if not (variant or widths or rows or dtypes):
        report["small"] = [small(n, d) for d, n in SMALL]
    faulthandler.cancel_dump_traceback_later()
    if json_path:
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    print(peers_table(report))
    return 0


def kernels_of(shape: Shape, variant: str | None) -> Iterator[Kernel]:
    """What `measure` will load."""
    batch, heads, n, d = shape.sizes
    case = Case("", n, n, d, d, shape.dtype, batch, heads, heads // shape.group, shape.is_causal)
    kernel = plan(*problem_of(case), return_lse=False, variant=variant).kernel
    yield kernel
    if kernel.variant == "sm90":
        yield replace(kernel, layout=exact_layout(shape))


def exact_layout(shape: Shape) -> Sm90Layout:
    """The tiles that `flash_sm90` has for it with ``maxima="exact"``."""
    return layout_for(
        shape.d, shape.d, n=shape.n, s=shape.n, is_causal=shape.is_causal, maxima="exact"
    )


def measure(shape: Shape, variant: str | None = None) -> dict[str, Any]:
    """One row: seconds of `flash_attention` and of each backend that takes the problem.

    Beside it, the same kernel on keys that grow along the row, so that maxima rise all the way, if
    it reuses maxima; and with maxima found anew for every tile, if it has such a choice.
    """
    q, k, v, out = inputs(shape)
    options = {"is_causal": shape.is_causal, "variant": variant}
    chosen = prepare(q, k, v, out=out, **options)
    contestants = {"ours": Contestant(partial(flash_attention, q, k, v, out=out, **options))}
    if chosen.variant == "sm90":
        exact = options | {"variant": "sm90", "layout": exact_layout(shape)}
        contestants["exact maxima"] = Contestant(prepare(q, k, v, out=out, **exact).launch)
    if chosen.variant in TENSOR_CORES and shape.dtype != "float32":
        grown = inputs(shape, growing=True)
        contestants["growing keys"] = Contestant(
            partial(flash_attention, *grown[:3], out=grown[3], **options)
        )
    contestants |= dict(torch_backends(q, k, v, shape.is_causal))
    return {
        **asdict(shape), "batch": shape.sizes[0], "heads": shape.sizes[1], "flops": shape.flops,
        "variant": chosen.variant, "block_q": chosen.layout.block_q,
        "block_k": chosen.layout.block_k, "registers": chosen.registers,
        "seconds": side_by_side(contestants),
    }  # fmt: skip


def inputs(shape: Shape, growing: bool = False) -> list[Any]:
    """q, k, v, out on the GPU."""
    import torch

    batch, heads, n, d = shape.sizes
    torch.manual_seed(0)
    shared = (batch, max(1, heads // shape.group), n, d)
    q, k, v, out = (
        torch.randn(x, device="cuda") for x in (shape.sizes, shared, shared, shape.sizes)
    )
    if growing:
        q, k = q.abs(), k + torch.arange(n, device="cuda")[:, None] * (8 / n)
    return [x.to(getattr(torch, shape.dtype)) for x in (q, k, v, out)]


def torch_backends(q: Any, k: Any, v: Any, is_causal: bool) -> Iterator[tuple[str, Contestant]]:
    """Torch's attention by each backend that has a kernel for this problem."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    shared = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    launch = partial(scaled_dot_product_attention, q, k, v, is_causal=is_causal, **shared)
    for name in BACKENDS:
        context = partial(sdpa_kernel, [getattr(SDPBackend, name.upper())])
        try:
            with context(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says why the others are not taken
                launch()
            torch.cuda.synchronize()
        except RuntimeError:
            continue
        yield name.removesuffix("_attention"), Contestant(launch, context)


def small(n: int, d: int, dtype: str = "float16", times: int = 200) -> dict[str, Any]:
    """One row of a small problem, batch 1: seconds a call, host included, one call after another.

    A call waits for the one before, so that neither host nor device can hide behind the other.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v, out = (
        torch.randn(1, HIDDEN // d, n, d, device="cuda").to(getattr(torch, dtype)) for _ in range(4)
    )
    contestants = {
        "ours": Contestant(partial(flash_attention, q, k, v, out=out)),
        "ours, prepared": Contestant(prepare(q, k, v, out=out).launch),
        **dict(torch_backends(q, k, v, False)),
        "default": Contestant(partial(scaled_dot_product_attention, q, k, v)),
    }
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, contestant in contestants.items():
            with contestant.context():
                contestant.launch()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(times):
                    contestant.launch()
                    torch.cuda.synchronize()
                found[name].append((time.perf_counter() - start) / times)
    seconds = {name: statistics.median(rounds) for name, rounds in found.items()}
    return {"n": n, "d": d, "heads": HIDDEN // d, "dtype": dtype, "seconds": seconds}


def side_by_side(contestants: dict[Any, Contestant]) -> dict[Any, float]:
    """Median seconds of a launch of each, in rounds that take turns."""
    import torch

    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def one_round(contestant: Contestant, times: int) -> list[float]:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
        with contestant.context():
            for start, end in marks:
                flush.zero_()
                start.record()
                contestant.launch()
                end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in marks]

    found: dict[Any, list[float]] = {}
    for name, contestant in contestants.items():
        one_round(contestant, 2)
        found[name] = one_round(contestant, 3)
    times = {
        name: max(3, min(20, round(ROUND_SECONDS / min(seconds))))
        for name, seconds in found.items()
    }
    found = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, contestant in contestants.items():
            found[name] += one_round(contestant, times[name])
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def ceiling(dtype: str) -> float:
    """FLOP/s of torch's matrix product, float32 without TF32."""
    import torch

    a, b = (
        torch.randn(CEILING, CEILING, device="cuda").to(getattr(torch, dtype)) for _ in range(2)
    )
    return 2 * CEILING**3 / side_by_side({0: Contestant(lambda: a @ b)})[0]


def command(
    variant: str | None, widths: tuple[int, ...], rows: tuple[int, ...], dtypes: tuple[str, ...]
) -> str:
    """The command line that prints this."""
    given = {"variant": (variant,) if variant else (), "dtype": dtypes, "d": widths, "n": rows}
    options = [f" --{name} {','.join(map(str, x))}" for name, x in given.items() if x]
    return "python -m kernels peers" + "".join(options)
