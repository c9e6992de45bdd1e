"""``python -m kernels tune``: the layouts' tables, measured again on this machine's GPU.

Every candidate that compiles without spills is timed beside the others, in rounds that take turns,
on the shapes of `kernels.peers`. A line a shape and mask says how fast each is, the best first: the
tables of ``mma_layout.py`` and ``sm90_layout.py`` were filled from them.
"""

from __future__ import annotations

import faulthandler
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from . import driver, mma_layout, sm90_layout
from .compiled import Kernel, compile_all, load
from .launch import prepare
from .peers import HANGS_AFTER_S, Contestant, Shape, inputs, side_by_side
from .problem import DTYPES

MMA = {  # bytes of an element: warps, row tiles a warp, Bc, blocks an SM
    2: ((4, 2, 64, 2), (4, 2, 64, 1), (8, 2, 64, 1), (8, 2, 32, 1), (8, 1, 64, 1), (8, 1, 128, 1),
        (4, 2, 32, 2), (4, 1, 64, 2)),
    4: ((4, 2, 32, 2), (4, 1, 32, 2), (4, 1, 32, 3), (4, 2, 16, 2), (8, 2, 16, 1), (4, 1, 16, 3)),
}  # fmt: skip
CHAINS = (2, 4)  # of float32: steps that tensor cores sum
SM90 = (  # groups, Bc, stages, column tiles that come early
    (2, 128, 2, 4), (2, 128, 2, 8), (2, 128, 3, 8), (2, 112, 2, 4), (2, 80, 2, 5), (2, 64, 3, 4),
    (3, 128, 2, 8), (3, 128, 3, 8), (3, 128, 3, 12), (3, 96, 3, 6),
)  # fmt: skip


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
    for (d, dtype), is_causal, n in itertools.product(found, (False, True), rows):
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        speeds = measure(variant, found[d, dtype], Shape(n, d, dtype, is_causal))
        best = ", ".join(f"{named(x)} {speed:.0f}" for x, speed in speeds)
        mask = "causal" if is_causal else "full"
        print(f"{variant} {dtype} d {d} N {n} {mask}: {best}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return 0


def candidates(variant: str, d: int, dtype: str) -> Iterator[Any]:
    """Layouts worth timing at width d."""
    itemsize = DTYPES[dtype]
    if variant == "sm90":
        usual = sm90_layout.layout_for(d, d, n=4096, s=4096)
        for groups, block_k, stages, early in SM90:
            yield replace(usual, groups=groups, block_k=block_k, stages=stages, early=early)
        return
    usual = mma_layout.layout_for(d, d, itemsize=itemsize)
    for warps, row_tiles, block_k, min_blocks in MMA[itemsize]:
        shape = replace(
            usual, warps=warps, row_tiles=row_tiles, block_k=block_k, min_blocks=min_blocks
        )
        yield from (replace(shape, chain=x) for x in (CHAINS if itemsize == 4 else (shape.chain,)))


def measure(variant: str, layouts: list[Any], shape: Shape) -> list[tuple[Any, float]]:
    """TFLOP/s of each layout that keeps everything in registers, the best first."""
    q, k, v, out = inputs(shape)
    options = {"out": out, "is_causal": shape.is_causal, "variant": variant}
    launches = {
        layout: Contestant(prepare(q, k, v, layout=layout, **options).launch)
        for layout in layouts
        if not load(Kernel(variant, layout, shape.dtype), 0).loaded.local_bytes
    }
    took = side_by_side(launches)
    return sorted(((x, shape.flops / s / 1e12) for x, s in took.items()), key=lambda x: -x[1])


def named(layout: Any) -> str:
    """Rows of the tiles, and what else tells candidates apart."""
    if isinstance(layout, mma_layout.MmaLayout):
        shape = f"{layout.warps}x{layout.row_tiles}x{layout.block_k}/{layout.min_blocks}"
        return shape if layout.itemsize == 2 else f"{shape} chain {layout.chain}"
    return f"{layout.block_q}x{layout.block_k}/{layout.stages} early {layout.early}"
