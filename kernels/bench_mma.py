"""The tensor-core kernel against torch on this machine's GPU: errors, then times.

    python -m kernels.bench_mma                 # both
    python -m kernels.bench_mma check           # errors against float64, beside torch's
    python -m kernels.bench_mma time --tiles    # times, other tile shapes too

The error allowed is twice that of torch's attention at the same precision against the same float64
result, plus one rounding to storage. Outputs start as NaN. Times are medians from device events, in
TFLOP/s, 16,384 tokens and 2,048 hidden columns in all; causal counts half.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .bench import seconds
from .mma_layout import MmaLayout, layout_for
from .problem import DTYPES

EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
HANGS_AFTER_S = 300
TOKENS, HIDDEN = 16384, 2048


@dataclass(frozen=True, slots=True)
class Case:
    n: int
    s: int
    d: int
    e: int
    dtype: str
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    is_causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    amplitude: float = 1.0


def cases() -> Iterator[Case]:
    """The grid, each axis varied around a ragged middle."""
    for dtype in DTYPES:
        for d, is_causal in itertools.product((8, 40, 64, 96, 128, 192, 256), (False, True)):
            yield Case(333, 333, d, d, dtype, is_causal=is_causal)
        for n, s in ((1, 1), (1, 777), (64, 64), (517, 200), (200, 517), (2048, 2048)):
            yield Case(n, s, 128, 128, dtype, is_causal=True)
            yield Case(n, s, 64, 64, dtype)
        yield Case(150, 170, 192, 128, dtype)
        yield Case(150, 170, 64, 128, dtype)
        yield Case(130, 130, 64, 64, dtype, batch=3, heads=8, kv_heads=2, is_causal=True)
        for window in ((100, 0), (-1, 5), (7, -1), (64, 64)):
            yield Case(300, 350, 64, 64, dtype, window_size=window)
        yield Case(300, 300, 64, 64, dtype, amplitude=1000.0)


def _layouts(case: Case, capability: tuple[int, int]) -> MmaLayout:
    return layout_for(
        case.d, case.e, is_causal=case.is_causal, itemsize=DTYPES[case.dtype],
        capability=capability,
    )  # fmt: skip


def check() -> int:
    """A line per case; 1 if one fails."""
    from .compiled import limits
    from .launch_mma import compile_all

    capability = limits(0).capability
    grid = list(cases())
    compile_all((_layouts(case, capability), case.dtype, capability) for case in grid)
    failed = 0
    for case in grid:
        error, allowed, lse_error = examine(case)
        good = error <= allowed and lse_error <= 2e-6
        failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {case}: O {error:.1e} of {allowed:.1e}, "
              f"L {lse_error:.1e}", flush=True)  # fmt: skip
    print(f"{len(grid) - failed} of {len(grid)} cases agree with float64")
    return 1 if failed else 0


def examine(case: Case) -> tuple[float, float, float]:
    """Error of O, what is allowed, and L's error relative to max(1, |L|)."""
    import torch

    from .launch_mma import attention

    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    lead, group = (case.batch,), case.heads // case.kv_heads
    q = torch.randn(*lead, case.heads, case.n, case.d, device="cuda") * case.amplitude
    k = torch.randn(*lead, case.kv_heads, case.s, case.d, device="cuda")
    v = torch.randn(*lead, case.kv_heads, case.s, case.e, device="cuda")
    q, k, v = (x.to(dtype) for x in (q, k, v))
    out = torch.full((*q.shape[:-1], case.e), float("nan"), device="cuda", dtype=dtype)
    mask = {"is_causal": case.is_causal, "window_size": case.window_size}
    _, lse = attention(q, k, v, out=out, return_lse=True, **mask)

    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    left, right = case.window_size
    right = 0 if case.is_causal else right
    position = torch.arange(case.n, device="cuda")[:, None] + case.s - case.n
    ahead = torch.arange(case.s, device="cuda") - position
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    S = (q.double() @ k.double().transpose(-1, -2)) * case.d**-0.5
    S = S.masked_fill(~seen, -torch.inf)
    L = torch.logsumexp(S, -1)
    exact = torch.nan_to_num(torch.softmax(S, -1)) @ v.double()
    sighted = seen.any(-1)
    other = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    error = (out.double() - exact).abs().max().item()
    theirs = (other.double() - exact)[..., sighted, :].abs().max().item()
    finite = torch.isfinite(L)
    if not torch.equal(torch.isneginf(lse), ~finite):
        return error, 0.0, float("inf")
    scale = L[finite].abs().clamp(min=1)
    lse_error = ((lse.double() - L)[finite].abs() / scale).max().item() if finite.any() else 0.0
    error = error if error == error else float("inf")
    return error, 2 * theirs + EPS[case.dtype] / 2 * exact.abs().max().item(), lse_error


def tiles(d: int, dtype: str) -> list[MmaLayout]:
    """Shapes worth timing."""
    if dtype == "float32":
        shapes = [(4, 2, 32, 2), (4, 2, 64, 1), (4, 1, 32, 2), (8, 1, 32, 1), (4, 2, 32, 1)]
    else:
        shapes = [(4, 2, 64, 2), (4, 2, 64, 1), (8, 2, 64, 1), (8, 1, 64, 1), (8, 2, 32, 1),
                  (4, 1, 64, 2), (8, 1, 128, 1), (4, 2, 32, 2)]  # fmt: skip
    usual = layout_for(d, d, itemsize=DTYPES[dtype])
    made = [
        replace(usual, warps=w, row_tiles=mt, block_k=bc, min_blocks=blocks)
        for w, mt, bc, blocks in shapes
    ]
    return [x for x in dict.fromkeys(made) if x.shared_bytes <= 227 * 1024]


def time(dtypes: list[str], every_tile: bool) -> int:
    """A line per shape: ours, torch's backends."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from .compiled import limits
    from .launch_mma import attention, compile_all, load

    capability = limits(0).capability
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION,
                SDPBackend.EFFICIENT_ATTENTION)  # fmt: skip

    def layouts(d: int, dtype: str, is_causal: bool) -> list[MmaLayout]:
        chosen = layout_for(d, d, is_causal=is_causal, itemsize=DTYPES[dtype],
                            capability=capability)  # fmt: skip
        return list(dict.fromkeys([chosen, *(tiles(d, dtype) if every_tile else [])]))

    grid = list(itertools.product(dtypes, (64, 128), (False, True)))
    compile_all((x, dtype, capability) for dtype, d, c in grid for x in layouts(d, dtype, c))
    for dtype, d, is_causal in grid:
        for n in (1024, 4096, 16384):
            shape = (TOKENS // n, HIDDEN // d, n, d)
            q, k, v, out = (
                torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for _ in range(4)
            )
            work = 4 * TOKENS * n * HIDDEN * (0.5 if is_causal else 1) / 1e12
            cells = []
            for layout in layouts(d, dtype, is_causal):
                run = lambda x=layout: attention(q, k, v, out=out, is_causal=is_causal, layout=x)  # noqa: B023, E731
                name = f"{layout.warps}x{layout.row_tiles}x{layout.block_k}/{layout.min_blocks}"
                loaded = load(layout, dtype, 0)
                spills = f" ({loaded.local_bytes} local)" if loaded.local_bytes else ""
                cells.append(f"{name}{spills} {work / seconds(run):.1f}")
            for backend in backends:
                try:
                    with sdpa_kernel([backend]):
                        run = lambda: scaled_dot_product_attention(q, k, v, is_causal=is_causal)  # noqa: B023, E731
                        name = backend.name.lower().removesuffix("_attention")
                        cells.append(f"{name} {work / seconds(run):.1f}")
                except RuntimeError:
                    continue
            mask = "causal" if is_causal else "full"
            print(f"{dtype} d {d} n {n} {mask}: " + ", ".join(cells), flush=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench_mma", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("check", "time"))
    parser.add_argument("--tiles", action="store_true", help="time other tile shapes too")
    parser.add_argument("--dtype", choices=list(DTYPES), action="append")
    options = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    failed = 0
    if options.what != "time":
        failed = check()
    faulthandler.cancel_dump_traceback_later()
    if options.what != "check":
        failed |= time(options.dtype or ["float16", "float32"], options.tiles)
    return failed


if __name__ == "__main__":
    sys.exit(main())
