"""``python -m kernels check --cores``: the tensor-core kernels against float64, beside torch.

The error allowed is twice that of torch's attention at the same precision against the same float64
result, plus one rounding to storage, and for float32 one of the largest score, which both must make
and which then is the larger. Outputs start as NaN, so that an element that is never written fails.
Needs torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .check import EPS, Outcome, mask_name, report
from .launch import prepare
from .problem import DTYPES

LSE_ALLOWED = 2e-6  # relative to max(1, |L|, the largest sum of |q k| that the row sees)
GROWING = ("normal", "growing", "jump", "alternating")  # how scores go along a row


@dataclass(frozen=True, slots=True)
class Case:
    """One problem: q is normal times ``amplitude``, keys as ``scores`` says."""

    variant: str
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
    scores: str = "normal"

    def __str__(self) -> str:
        mask = mask_name(self.is_causal, self.window_size)
        extra = f", x {self.amplitude:g}" if self.amplitude != 1 else ""
        extra += f", {self.scores}" if self.scores != "normal" else ""
        return (
            f"{self.variant:<4} {self.dtype:<8} {self.batch}x{self.heads}/{self.kv_heads} heads "
            f"{self.n} x {self.s}, d {self.d}, e {self.e}, {mask}{extra}"
        )


def small_cases(variant: str, dtypes: Iterable[str] = DTYPES) -> Iterator[Case]:
    """What a sanitizer bears."""
    for dtype in dtypes:
        yield Case(variant, 70, 150, 40, 24, dtype, heads=2, kv_heads=1, is_causal=True)
        yield Case(variant, 300, 300, 64, 64, dtype)
        yield Case(variant, 130, 260, 128, 128, dtype, is_causal=True)
        yield Case(variant, 200, 200, 64, 64, dtype, window_size=(50, 3), scores="growing")


def cases(variant: str, dtypes: Iterable[str] = DTYPES) -> Iterator[Case]:
    """The grid, each axis varied around a ragged middle."""
    for dtype in dtypes:
        for d, is_causal in itertools.product((16, 40, 64, 96, 128, 192, 256), (False, True)):
            yield Case(variant, 333, 333, d, d, dtype, is_causal=is_causal)
        for n, s in ((1, 1), (1, 777), (64, 64), (517, 200), (200, 517), (2048, 2048)):
            yield Case(variant, n, s, 128, 128, dtype, is_causal=True)
            yield Case(variant, n, s, 64, 64, dtype)
            yield Case(variant, n, s, 64, 64, dtype, is_causal=True)
            yield Case(variant, n, s, 128, 128, dtype)
        for d, e in ((192, 128), (64, 128), (128, 64), (72, 256)):
            yield Case(variant, 150, 170, d, e, dtype)
        for batch, heads, kv_heads in ((3, 8, 2), (2, 6, 1), (1, 70, 70)):
            yield Case(variant, 130, 130, 64, 64, dtype, batch, heads, kv_heads, True)
            yield Case(variant, 300, 300, 128, 128, dtype, batch, heads, kv_heads)
        for window in ((100, 0), (-1, 5), (7, -1), (64, 64), (0, 0), (300, 20)):
            yield Case(variant, 300, 350, 64, 64, dtype, window_size=window)
            yield Case(variant, 600, 500, 128, 128, dtype, window_size=window)
        for d, amplitude in itertools.product((64, 128), (20.0, 300.0, 1000.0)):
            yield Case(variant, 600, 600, d, d, dtype, amplitude=amplitude)
            yield Case(variant, 600, 600, d, d, dtype, is_causal=True, amplitude=amplitude)
        for d, scores in itertools.product((64, 128), GROWING[1:]):
            yield Case(variant, 700, 1500, d, d, dtype, scores=scores)
            yield Case(variant, 1500, 1500, d, d, dtype, is_causal=True, scores=scores)


def main(variants: Iterable[str], dtypes: Iterable[str] = DTYPES, small: bool = False) -> int:
    """`kernels.check.report` of the grid."""
    from .compiled import compile_all

    listed = small_cases if small else cases
    grid = [case for variant in variants for case in listed(variant, dtypes) if taken(case)]
    if not grid:
        raise ValueError(
            f"--variant, --dtype: {','.join(variants)} in {','.join(dtypes)} is not for this device"
        )
    compile_all(prepared_kernel(case) for case in grid)
    return report(grid, examine)


def tensors(case: Case) -> list[Any]:
    """q, k, v on the GPU, in storage precision."""
    import torch

    torch.manual_seed(0)
    lead = (case.batch, case.kv_heads)
    q = torch.randn(case.batch, case.heads, case.n, case.d, device="cuda") * case.amplitude
    k = torch.randn(*lead, case.s, case.d, device="cuda")
    v = torch.randn(*lead, case.s, case.e, device="cuda")
    position = torch.arange(case.s, device="cuda") / max(1, case.s - 1)
    match case.scores:  # in octaves, about: q . k along one direction
        case "growing":
            rise = 60 * position
        case "jump":
            rise = 40 * (position > 0.7) + 40 * (position > 0.9)
        case "alternating":
            rise = 50 * (torch.arange(case.s, device="cuda") // 100 % 2)
        case _:
            rise = 0 * position
    q[..., 0] = q[..., 0] if case.scores == "normal" else case.d**0.25
    k[..., 0] = k[..., 0] if case.scores == "normal" else rise * case.d**0.25
    return [x.to(getattr(torch, case.dtype)) for x in (q, k, v)]


def problem_of(case: Case) -> tuple[Any, list[Any]]:
    """The problem and its views, of tensors that nobody made."""
    from .problem import Problem
    from .tensors import Tensor, contiguous

    shapes = (
        (case.batch, case.heads, case.n, case.d), (case.batch, case.kv_heads, case.s, case.d),
        (case.batch, case.kv_heads, case.s, case.e), (case.batch, case.heads, case.n, case.e),
    )  # fmt: skip
    problem = Problem.of(
        *shapes[:3], case.dtype, is_causal=case.is_causal, window_size=case.window_size
    )
    size = DTYPES[case.dtype]
    views = [
        Tensor(name, "other", 1024, shape, contiguous(shape), case.dtype, size, 0, None)
        for name, shape in zip(("q", "k", "v", "out"), shapes, strict=True)
    ]
    return problem, views


def taken(case: Case) -> bool:
    """Whether the kernel is for this case."""
    from .driver import limits
    from .plans import refusal

    return not refusal(case.variant, *problem_of(case), limits(0).capability)


def prepared_kernel(case: Case) -> Any:
    """What `examine` will load."""
    from .plans import plan

    problem, views = problem_of(case)
    return plan(problem, views, return_lse=True, variant=case.variant).kernel


def examine(case: Case, layout: Any = None) -> Outcome:
    """Run a case on the GPU and compare it with float64, L's error as `LSE_ALLOWED` says.

    A score is a sum of d products, rounded in proportion to the sum of their magnitudes: where they
    cancel, L cannot be as exact as it is small.
    """
    import torch

    q, k, v = tensors(case)
    out = torch.full((*q.shape[:-1], case.e), float("nan"), device="cuda", dtype=q.dtype)
    mask = {"is_causal": case.is_causal, "window_size": case.window_size}
    launch = prepare(q, k, v, out=out, return_lse=True, variant=case.variant, layout=layout, **mask)
    launch.lse.fill_(float("nan"))
    launch.launch()
    lse = launch.lse

    group = case.heads // case.kv_heads
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
    theirs = (other.double() - exact)[..., sighted, :].abs()
    theirs = theirs.max().item() if theirs.numel() else 0.0
    finite = torch.isfinite(L)
    if not torch.equal(torch.isneginf(lse), ~finite):
        return Outcome(error, 0.0, float("inf"), LSE_ALLOWED)
    sizes = (q.double().abs() @ k.double().abs().transpose(-1, -2)) * case.d**-0.5
    sizes = sizes.masked_fill(~seen, 0).amax(-1)
    scale = torch.maximum(L.abs(), sizes)[finite].clamp(min=1)
    lse_error = ((lse.double() - L)[finite].abs() / scale).max().item() if finite.any() else 0.0
    error = error if error == error else float("inf")
    allowed = 2 * theirs + EPS[case.dtype] / 2 * exact.abs().max().item()
    if case.dtype == "float32":
        largest = S.masked_fill(~seen, 0).abs().max() * v.abs().max()
        allowed += EPS["float32"] / 2 * largest.item()
    return Outcome(error, allowed, lse_error, LSE_ALLOWED)
