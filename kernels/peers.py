"""``python -m kernels peers``: `flash_attention` beside torch's backends, in one process.

16,384 tokens and 2,048 hidden columns whatever the sequence length and width, random normal input.
Rounds of launches take turns, so that all see the same clocks; a time is the median of its rounds,
between device events. The ceiling is torch's matrix product of 8192 x 8192 in the same type: what
the card's power lets the tensor cores do. Causal counts half the work.
"""

from __future__ import annotations

import faulthandler
import json
import statistics
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .bench import HIDDEN, TOKENS, environment
from .launch import flash_attention, prepare

HANGS_AFTER_S = 240
ROUND_SECONDS, ROUNDS = 0.03, 7  # a round of launches runs at least so long
CEILING = 8192
BACKENDS = ("flash_attention", "cudnn_attention", "efficient_attention")


def main(
    *,
    widths: tuple[int, ...],
    rows: tuple[int, ...],
    dtypes: tuple[str, ...],
    masks: tuple[str, ...] = ("full", "causal"),
    json_path: Path | None = None,
) -> int:
    """Time every shape; print a table, and write the rows if asked to."""
    from .results import peers_table

    report: dict[str, Any] = {"command": command(widths, rows, dtypes, masks), **environment()}
    report |= {"ceiling": {}, "peers": []}
    for dtype in dtypes:
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        report["ceiling"][dtype] = ceiling(dtype)
        for d, is_causal, n in ((d, m == "causal", n) for d in widths for m in masks for n in rows):
            faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
            report["peers"].append(measure(n, d, dtype, is_causal))
            if json_path:
                json_path.write_text(json.dumps(report, indent=1) + "\n")
    faulthandler.cancel_dump_traceback_later()
    print(peers_table(report))
    return 0


def measure(n: int, d: int, dtype: str, is_causal: bool) -> dict[str, Any]:
    """One row: seconds of `flash_attention` and of each backend that takes the problem."""
    import torch

    batch, heads = max(1, TOKENS // n), max(1, HIDDEN // d)
    torch.manual_seed(0)
    q, k, v, out = (
        torch.randn(batch, heads, n, d, device="cuda").to(getattr(torch, dtype)) for _ in range(4)
    )
    chosen = prepare(q, k, v, is_causal=is_causal, out=out)
    launches: dict[str, Callable[[], object]] = {
        "ours": lambda: flash_attention(q, k, v, is_causal=is_causal, out=out)
    }
    launches |= dict(torch_backends(q, k, v, is_causal))
    layout = chosen.layout
    return {
        "n": n, "d": d, "batch": batch, "heads": heads, "is_causal": is_causal, "dtype": dtype,
        "flops": 4 * batch * heads * n * n * d // (2 if is_causal else 1),
        "variant": chosen.variant, "block_q": layout.block_q, "block_k": layout.block_k,
        "registers": chosen.registers, "seconds": side_by_side(launches),
    }  # fmt: skip


def torch_backends(
    q: Any, k: Any, v: Any, is_causal: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Torch's attention by each backend that has a kernel for this problem."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    for name in BACKENDS:
        backend = getattr(SDPBackend, name.upper())

        def launch(backend=backend) -> object:
            with sdpa_kernel([backend]):
                return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says why the others are not taken
                launch()
            torch.cuda.synchronize()
        except RuntimeError:
            continue
        yield name.removesuffix("_attention"), launch


def side_by_side(launches: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of a launch of each, in rounds that take turns."""
    import torch

    def one_round(launch: Callable[[], object], times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            launch()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / times

    times = {}
    for name, launch in launches.items():
        one_round(launch, 2)
        times[name] = max(1, min(500, round(ROUND_SECONDS / max(one_round(launch, 2), 1e-6))))
    rounds: dict[str, list[float]] = {name: [] for name in launches}
    for _ in range(ROUNDS):
        for name, launch in launches.items():
            rounds[name].append(one_round(launch, times[name]))
    return {name: statistics.median(found) for name, found in rounds.items()}


def ceiling(dtype: str) -> float:
    """FLOP/s of torch's matrix product, float32 without TF32."""
    import torch

    a, b = (
        torch.randn(CEILING, CEILING, device="cuda").to(getattr(torch, dtype)) for _ in range(2)
    )
    return 2 * CEILING**3 / side_by_side({"product": lambda: a @ b})["product"]


def command(
    widths: tuple[int, ...],
    rows: tuple[int, ...],
    dtypes: tuple[str, ...],
    masks: tuple[str, ...],
) -> str:
    """The command line that prints this."""
    d, n = (",".join(map(str, numbers)) for numbers in (widths, rows))
    only = f" --{masks[0]}" if len(masks) == 1 else ""
    return f"python -m kernels peers --dtype {','.join(dtypes)} --d {d} --n {n}{only}"
