"""``python -m kernels tune``: the layouts' tables, measured again on this machine's GPU.

Every candidate that compiles without spills is timed beside the others, in rounds that take turns,
on the shapes of `kernels.peers`. A line a shape and mask says how fast each is, the best first; at
the end come the rows of ``LAYOUTS``, in ``mma_layout.py`` or ``sm90_layout.py``, that follow.
"""

from __future__ import annotations

import faulthandler
import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from . import driver, mma_layout, sm90_layout
from .compiled import Kernel, compile_all, load
from .launch import prepare
from .peers import HANGS_AFTER_S, Contestant, Shape, inputs, side_by_side
from .problem import DTYPES

MMA = {  # bytes of an element: warps, row tiles a warp, Bc, blocks an SM
    2: ((4, 2, 64, 2), (4, 2, 64, 1), (8, 2, 64, 1), (8, 2, 32, 1), (8, 1, 64, 1), (8, 1, 128, 1),
        (4, 2, 32, 2), (4, 2, 32, 1), (4, 1, 64, 2), (4, 1, 32, 1)),
    4: ((4, 2, 32, 2), (4, 1, 32, 2), (4, 1, 32, 3), (4, 2, 16, 2), (8, 2, 16, 1), (4, 1, 16, 3),
        (4, 1, 16, 1)),
}  # fmt: skip
CHAINS = (2, 4)  # of float32: steps that tensor cores sum; the table has the first
SM90 = (  # groups, Bc, stages, of Q, column tiles that come early; wide ones have room for few
    (2, 128, 2, 2, 4), (2, 128, 2, 2, 8), (2, 128, 3, 2, 8), (2, 128, 4, 3, 4), (2, 112, 2, 2, 4),
    (2, 96, 2, 1, 6), (2, 80, 2, 1, 5), (2, 64, 2, 1, 4), (2, 64, 3, 1, 4), (3, 128, 2, 2, 8),
    (3, 128, 3, 2, 8), (3, 128, 3, 2, 12), (3, 96, 3, 2, 6),
)  # fmt: skip
STAYS = (2, 128, 4, 3, 4)  # with warpgroups without rows at work, too
GAIN = 1.01  # less is none
NEVER = 1 << 31
Found = dict[tuple[bool, int], dict[Any, float]]  # by mask and N: TFLOP/s of each layout


def main(
    *,
    variant: str,
    widths: tuple[int, ...],
    rows: tuple[int, ...],
    dtypes: tuple[str, ...],
) -> int:
    """Time every candidate on every shape."""
    if variant == "sm90" and "float32" in dtypes:
        raise ValueError("--dtype: float32 is not for sm90, which takes float16 and bfloat16")
    shared = driver.limits(0).shared_per_block
    found = {
        (d, dtype): [x for x in candidates(variant, d, dtype) if x.shared_bytes <= shared]
        for d, dtype in itertools.product(widths, dtypes)
    }
    compile_all(Kernel(variant, x, dtype) for (_, dtype), xs in found.items() for x in xs)
    lines = []
    for (d, dtype), layouts in found.items():
        speeds: Found = {}
        for is_causal, n in itertools.product((False, True), rows):
            faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
            took = measure(variant, layouts, Shape(n, d, dtype, is_causal))
            speeds[is_causal, n] = took
            best = ", ".join(f"{named(x)} {took[x]:.0f}" for x in sorted(took, key=took.get)[::-1])
            mask = "causal" if is_causal else "full"
            print(f"{variant} {dtype} d {d} N {n} {mask}: {best}", flush=True)
        lines += [f"{row},  # {dtype}" for row in table(d, speeds)]
    faulthandler.cancel_dump_traceback_later()
    print("", *lines, sep="\n")
    return 0


def table(d: int, speeds: Found) -> list[tuple[Any, ...]]:
    """The rows of ``LAYOUTS`` for width d: those with the largest geometric mean of speeds.

    For `flash_mma` that is one layout, of those whose chain is the usual one; for `flash_sm90` one
    for long rows and, where that gains more than `GAIN`, another for short ones. From which N on
    rows are long depends on the mask.
    """
    (layouts, *_) = speeds.values()
    layouts = [x for x in layouts if getattr(x, "chain", CHAINS[0]) == CHAINS[0]]
    if not layouts:  # all of them spill
        return []
    one = max(layouts, key=lambda x: total(speeds, x, x)[0])
    if isinstance(one, mma_layout.MmaLayout):
        return [(d, d, (one.warps, one.row_tiles, one.block_k, one.min_blocks))]
    pairs = itertools.permutations(layouts, 2)
    long, short = max(pairs, key=lambda pair: total(speeds, *pair)[0], default=(one, one))
    mean, least = total(speeds, long, short)
    if mean < GAIN * total(speeds, one, one)[0]:
        return [(d, d, 0, 0, options(one))]
    return [(d, d, *least, options(long)), (d, d, 0, 0, options(short))]


def total(speeds: Found, long: Any, short: Any) -> tuple[float, list[int]]:
    """The mean speed of two layouts, and the best N, without a mask and causal, to change at."""
    best, changes = [], []
    for is_causal in (False, True):
        lengths = sorted(n for mask, n in speeds if mask == is_causal)
        ways = []
        for change in (*lengths, NEVER):
            took = [speeds[is_causal, n][long if n >= change else short] for n in lengths]
            ways.append((math.prod(took), -change, took))
        _, change, took = max(ways)
        changes.append(-change)
        best += took
    return statistics.geometric_mean(best), changes


def options(layout: sm90_layout.Sm90Layout) -> dict[str, int]:
    """What tells it from others of its widths: what has no default, or another value."""
    usual = {x.name: x.default for x in fields(layout)}
    given = {x: getattr(layout, x) for x in usual if x not in ("d", "e", "maxima", "itemsize")}
    return {x: value for x, value in given.items() if x == "early" or value != usual[x]}


def candidates(variant: str, d: int, dtype: str) -> Iterator[Any]:
    """Layouts worth timing at width d."""
    itemsize = DTYPES[dtype]
    if variant == "sm90":
        usual = sm90_layout.layout_for(d, d, n=4096, s=4096)
        for shape in SM90:
            given = dict(
                zip(("groups", "block_k", "stages", "q_stages", "early"), shape, strict=True)
            )
            sits_out = sm90_layout.can_sit_out(given["groups"], given["stages"])
            layout = replace(usual, **given, sits_out=sits_out)
            yield layout
            if shape == STAYS:
                yield replace(layout, sits_out=False)
        return
    usual = mma_layout.layout_for(d, d, itemsize=itemsize)
    for warps, row_tiles, block_k, min_blocks in MMA[itemsize]:
        shape = replace(
            usual, warps=warps, row_tiles=row_tiles, block_k=block_k, min_blocks=min_blocks
        )
        yield from (replace(shape, chain=x) for x in (CHAINS if itemsize == 4 else (shape.chain,)))


def measure(variant: str, layouts: list[Any], shape: Shape) -> dict[Any, float]:
    """TFLOP/s of each layout that keeps everything in registers."""
    q, k, v, out = inputs(shape)
    given = {"out": out, "is_causal": shape.is_causal, "variant": variant}
    launches = {
        layout: Contestant(prepare(q, k, v, layout=layout, **given).launch)
        for layout in layouts
        if not load(Kernel(variant, layout, shape.dtype), 0).loaded.local_bytes
    }
    return {x: shape.flops / took / 1e12 for x, took in side_by_side(launches).items()}


def named(layout: Any) -> str:
    """Rows of the tiles, and what else tells candidates apart."""
    if isinstance(layout, mma_layout.MmaLayout):
        shape = f"{layout.warps}x{layout.row_tiles}x{layout.block_k}/{layout.min_blocks}"
        return shape if layout.itemsize == 2 else f"{shape} chain {layout.chain}"
    stages = f"{layout.stages}+{layout.q_stages}"
    stays = "" if layout.sits_out else " stays"
    return f"{layout.block_q}x{layout.block_k}/{stages} early {layout.early}{stays}"
